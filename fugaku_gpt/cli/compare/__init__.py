"""``fugaku-gpt compare``: two ways to run, side by side."""
