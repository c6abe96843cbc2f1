"""Facts about hardware: of this machine, read at run time; and what a process knows and does about itself on it."""
