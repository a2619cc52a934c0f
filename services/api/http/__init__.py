"""The HTTP server: ``sockets`` -> ``server`` (uvicorn) -> ``app`` (paths, API keys, what every answer has) -> ``endpoints``.

The bodies are OpenAI's (``openai``, ``responses``), Anthropic's (``messages``), llama-server's (``llama_server``) and
Ollama's (``ollama``). All of them become an ``Asked``, so that a conversation gives the same tokens whichever way it comes.
"""
