"""A simulator of PJM for job scripts and tests: its pjsub, pjstat, ... run the scripts on this machine."""
