"""Lines of logs: other people's texts in them, the names of requests, and lines that would be too many."""
