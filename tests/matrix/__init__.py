"""Tests of the same training on every PyTorch build that installs here: golden curves, checkpoints between builds, and
the program that runs the tests on all builds (``make test-matrix``)."""
