"""What a node listens on: gRPC, REST and metrics."""
