"""Spreads a model over ranks: tensor-parallel layers and the vocabulary-parallel loss, with or without sequence
parallelism; pipeline stages; sums of gradients over replicas."""
