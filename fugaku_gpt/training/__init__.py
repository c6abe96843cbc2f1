"""The training loop and what it is made of: optimiser, schedule, start-up report, log."""
