"""Job scripts, the schedulers that run them, and the store of runs that they leave."""
