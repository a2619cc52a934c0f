"""The doors and what passes them."""
