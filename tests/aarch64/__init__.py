"""Tests on an emulated Arm machine: `make test-arm`."""
