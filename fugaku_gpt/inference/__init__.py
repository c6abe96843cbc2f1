"""Uses a trained model: text from prompts, and losses of texts, in any layout of ranks."""
