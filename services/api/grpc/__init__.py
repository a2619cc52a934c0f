"""The public gRPC API, outrider.v1."""
