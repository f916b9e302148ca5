"""How accurately the system answers, as it will be served."""
