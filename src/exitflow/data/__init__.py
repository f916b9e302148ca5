"""Data sets, and which node holds which part of them."""
