"""How a model is spread over ranks: tensor-parallel layers and the vocabulary-parallel loss, with sequences whole or
cut; stages of a pipeline; sums of gradients over replicas."""
