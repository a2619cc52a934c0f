"""Links, and messages on them."""
