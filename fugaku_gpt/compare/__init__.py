"""Which of two ways to run is faster, by how much, and why: samples and recorded runs in, verdicts out.

Ratios are B over A of seconds per iteration: below 1, B is faster.
"""
