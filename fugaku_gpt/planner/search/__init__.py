"""Searches the fastest layout of a model on a number of nodes."""
