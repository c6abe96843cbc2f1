"""Environments: one for each build of PyTorch; what its profile in ``env/`` says, making it, and checking it."""
