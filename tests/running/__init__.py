"""How tests run: what they share out, wait for, leave behind, refuse and have time for."""
