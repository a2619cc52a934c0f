"""Linear layers, experts and parameters whose results do not depend on the other rows of a pass."""
