"""The arithmetic of parallelism as pure data: who sits where, who holds what, who reads which samples."""
