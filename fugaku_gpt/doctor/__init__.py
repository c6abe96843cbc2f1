"""What is wrong: with this machine, or with a run that did not end well."""
