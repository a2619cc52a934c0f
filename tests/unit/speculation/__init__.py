"""Trees, messages, budget and errors."""
