"""OpenAI's HTTP API in front of a router: chat and text completions, models, tokens, health.

A request goes through these modules in order::

    http_server     the socket and uvicorn
    http_app        paths, API keys, what every answer has
    json_body       bytes -> JSON, within limits
    fields          JSON -> fields, each of which is taken or refused
    chat_request, completion_request    fields -> ``Asked``
    generation      ``Asked`` -> one ``ClientRequest`` for each choice, run side by side
    choice_text     their chunks -> pieces of text with their tokens
    chat_answer, completion_answer      pieces -> JSON, whole or in events
    event_stream    JSON -> server-sent events

Nothing that a user sends is ignored: a field is honoured, or refused by name.
"""
