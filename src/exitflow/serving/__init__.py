"""The trained network on every node of the hierarchy: bundles, nodes, rate control, load. PyTorch only exports."""
