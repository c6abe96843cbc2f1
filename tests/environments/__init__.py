"""Tests of ``fugaku_gpt.environments``."""
