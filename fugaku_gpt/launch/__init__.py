"""How ranks start and end on this machine; nothing here knows of schedulers."""
