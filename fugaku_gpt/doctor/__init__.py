"""Diagnoses problems of this machine, and of a run that did not end well."""
