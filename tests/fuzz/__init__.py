"""Fuzzing of every reader of untrusted files: only errors of ours come out, soon, and in little memory."""
