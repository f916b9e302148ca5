"""Plans from what is known: measured answers, time and prices."""
