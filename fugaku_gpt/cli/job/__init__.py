"""``fugaku-gpt job``: write, check, submit, follow and collect jobs."""
