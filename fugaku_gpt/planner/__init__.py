"""Predicts the time and the memory of runs, with the uncertainty of the predictions."""
