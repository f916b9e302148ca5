"""Where local training happens on machines of one's own: here, in a pool of processes, or on a Ray cluster."""
