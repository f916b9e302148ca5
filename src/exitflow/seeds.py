"""Randomness that depends on names only.

Every random choice takes its seed from the run's seed and the names of what it is for, such as
`derive(seed, "batches", round, node)`. So serial and parallel runs draw the same, a resumed run draws what the
uninterrupted one would have drawn, and adding a node changes nothing for the others.
"""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A seed of 63 bits for the thing that `names` name."""
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
