"""speculation's messages <-> outrider.internal.v1, both ways: one module per proto file.

Every message between components passes through this codec, even where they share a process.
"""
