"""The wire between actors and inference: packed rows over streaming gRPC."""
