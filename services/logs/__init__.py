"""Lines of logs: texts of others in them, and lines that would be too many."""
