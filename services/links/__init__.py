"""The links between components.

``codec`` converts the messages of ``speculation.messages`` to and from the internal protobuf messages. ``in_process`` and
``grpc_*`` are two ways to carry the same bytes; ``tls`` has what proves a component's role.
"""
