"""How jobs are started. The launcher starts ranks; it knows nothing of schedulers."""
