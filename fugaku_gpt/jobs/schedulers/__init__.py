"""The schedulers: one module for each, behind one protocol."""
