"""How fast exitflow is, as ratios to a limit that was measured in the same interleaved run."""
