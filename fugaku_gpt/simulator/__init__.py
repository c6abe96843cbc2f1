"""A PJM of one machine, for trying job scripts and for tests: pjsub and its kin that really run them here."""
