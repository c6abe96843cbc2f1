"""Judges runs before they run: how long an iteration takes, what memory it needs, and how far off such figures are."""
