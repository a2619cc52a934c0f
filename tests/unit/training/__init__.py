"""The training of drafters."""
