"""Algorithm 1: sample, train locally, aggregate; over and over."""
