"""Answers whose stream tells those who watch the line nothing but its length."""
