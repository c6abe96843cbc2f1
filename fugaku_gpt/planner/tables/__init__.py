"""Iteration times fitted to the rows of result tables, which other trainers left on other machines."""
