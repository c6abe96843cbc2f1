"""Facts about machines: data files, this machine as read at run time, and the limits and settings of this process."""
