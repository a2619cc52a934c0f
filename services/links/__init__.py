"""The links between components, and the only home of gRPC and protobuf.

``codec`` converts the messages of ``speculation.messages`` to and from the internal protobuf messages; ``public`` does the
same for the public API. ``in_process`` and ``grpc_*`` are two ways to carry the same bytes.
"""
