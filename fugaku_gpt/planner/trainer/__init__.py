"""Time and memory of this trainer on a machine that was probed."""
