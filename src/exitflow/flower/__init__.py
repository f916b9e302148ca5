"""Flower underneath: messages, the warm worker of a node, and the processes of a federation."""
