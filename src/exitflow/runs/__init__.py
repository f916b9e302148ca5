"""A training on disk: assembling, training, comparing, and what can be asked of it."""
