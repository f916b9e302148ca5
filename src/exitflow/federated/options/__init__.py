"""What a federation may ask for beside Algorithm 1: compression, privacy, rules for nodes that fail."""
