"""Counts of parameters and floating-point operations, each with its source."""
