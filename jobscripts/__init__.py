"""Templates of job scripts, one for each scheduler over a common base; see ``fugaku_gpt.jobs.render``."""
