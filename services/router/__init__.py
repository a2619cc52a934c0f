"""The router: from a user's words to token ids and a plan, and from tokens back to words."""
