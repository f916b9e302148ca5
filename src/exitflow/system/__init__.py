"""A system: the tree, its model, its data and its training, read from one file."""

from pathlib import Path


def template() -> bytes:
    """A system file with comments, to begin with."""
    return Path(__file__).with_name("template.toml").read_bytes()
