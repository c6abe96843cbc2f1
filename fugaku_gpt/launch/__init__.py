"""Starts ranks on this machine and judges how they ended; knows nothing of schedulers."""
