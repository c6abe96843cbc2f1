"""Compares two ways to run: samples and recorded runs go in, verdicts come out (which is faster, by how much, and why).

Ratios are B over A of seconds per iteration: below 1, B is faster.
"""
