"""Models' files."""
