"""The links between components, and the only home of gRPC and protobuf.

``codec`` turns the messages of ``speculation.messages`` into the internal protobuf messages and back, ``public`` does so for
the public API. ``in_process`` and ``grpc_*`` are two ways to carry the same bytes.
"""
