"""A node: it answers what it is sure of and forwards the rest within its link's limit."""
