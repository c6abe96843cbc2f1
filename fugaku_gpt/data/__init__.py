"""Tokens in: Megatron's memory-mapped corpora, and a sample order without state."""
