"""Tests of ``fugaku_gpt.kernels``."""
