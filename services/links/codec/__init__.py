"""speculation's messages <-> outrider.internal.v1, both ways: one module per proto file.

Every message that travels between components passes through here, also where they share a process.
"""
