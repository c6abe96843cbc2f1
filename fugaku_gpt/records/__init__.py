"""The formats of what runs leave behind, readable with the standard library and NumPy."""
