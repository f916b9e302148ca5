"""Whole jobs: a system from a file, a training in a run directory, evaluations and comparisons of runs."""
