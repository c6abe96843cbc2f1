"""What PJM says and understands: its scripts, options, resource groups, messages, states, codes and statistics."""
