"""Environments, one for each build of PyTorch: finds their profiles in ``env/``, creates and checks them."""
