"""Calls to the file system that fail: each that a command makes, one at a time."""
