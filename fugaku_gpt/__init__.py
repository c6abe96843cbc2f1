"""GPT training on CPU supercomputers, and the jobs and tables around it."""

__version__ = "0.1.0"
