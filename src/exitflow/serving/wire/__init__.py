"""What travels between nodes and clients: messages, tensors, addresses, certificates."""
