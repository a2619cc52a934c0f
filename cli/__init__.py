"""The command line, above everything."""
