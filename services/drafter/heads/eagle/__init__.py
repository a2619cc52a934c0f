"""Heads of the EAGLE family: EAGLE-1, 2 and 3, HASS, FSPAD."""
