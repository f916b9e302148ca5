"""Commands that are many enough to live beside cli.py."""
