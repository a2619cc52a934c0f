"""Speculative streams over a frozen target (Bhendawade et al., 2402.11131)."""
