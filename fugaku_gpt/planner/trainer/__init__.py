"""Models of the time and the memory of this trainer."""
