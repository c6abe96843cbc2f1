"""From run directories to tables."""
