"""``fugaku-gpt plan``: what fits, how long it takes and which layout is fastest, before a job is queued."""
