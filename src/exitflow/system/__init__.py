"""A system: the tree, its model, its data and its training, read from one file."""
