"""The hierarchy and the rates that flow through it. Needs no PyTorch."""
