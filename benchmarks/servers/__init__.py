"""Other servers, each in an environment of its own."""
