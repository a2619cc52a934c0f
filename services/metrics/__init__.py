"""What the service counts and measures: one port, a table of all names, and the sinks behind it."""
