"""The retrieval service: serves one index, and switches to another version without interrupting look-ups."""
