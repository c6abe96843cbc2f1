"""Facts about hardware: of this machine, read at run time; and what a process does about itself on it."""
