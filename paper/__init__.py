"""The bench of one paper, on top of exitflow: its tables, their trainings, and what came out."""
