"""Ollama's API: its bodies as those of chats and completions that say the same, and answers as lines of JSON."""
