"""The decoding loop."""
