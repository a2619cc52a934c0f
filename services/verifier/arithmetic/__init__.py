"""Linear layers, experts and parameters whose results do not depend on what shares a pass."""
