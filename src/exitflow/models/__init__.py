"""Networks that hold smaller networks: the contract, the families, and what each exit costs."""
