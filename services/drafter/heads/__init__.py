"""Drafters of hidden states (EAGLE-1, 2 and 3, HASS, FSPAD): their checkpoints, what they compute, and how they draft."""
