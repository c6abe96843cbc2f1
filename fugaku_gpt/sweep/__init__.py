"""Expands a sweep file into runs, and runs them one at a time on this machine or submits them as jobs."""
