"""A tree on one machine, and the requests that it is tried with."""
