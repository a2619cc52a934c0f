"""How a step decides whom to ask for drafts, how long to wait for them, and which rows to compute. See docs/decisions.md."""
