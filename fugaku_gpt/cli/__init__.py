"""The command line: one short module per verb group, which parses, calls and prints."""
