"""Lines of logs: texts of others in them, the names of requests, and lines that would be too many."""
