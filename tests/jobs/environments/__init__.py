"""Tests of ``fugaku_gpt.jobs.environments``."""
