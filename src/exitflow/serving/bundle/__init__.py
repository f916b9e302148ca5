"""A bundle: the network in segments, with what a node must know to serve it."""
