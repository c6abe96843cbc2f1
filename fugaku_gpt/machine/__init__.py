"""Facts about hardware: of this machine, read at run time."""
