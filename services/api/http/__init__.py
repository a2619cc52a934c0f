"""The HTTP server: ``sockets`` -> ``server`` (uvicorn) -> ``app`` (paths, API keys, what every answer has) -> ``endpoints``.

The bodies are OpenAI's: see ``openai``.
"""
