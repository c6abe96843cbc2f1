"""How a model is spread over ranks: tensor-parallel layers, the vocabulary-parallel loss, data-parallel gradient
sums."""
