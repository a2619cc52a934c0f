"""Anthropic's messages: requests and answers of /v1/messages.

A request goes through these modules in order::

    protocol        what a body may hold, declared; ``replies``: what is answered; ``unhonoured``: what is refused by name
    chat_body       Anthropic's body -> the body of a chat that says the same
    reading         that body -> ``Asked``, by the rules of chats; errors in Anthropic's names (``own_names``)
    endpoints       what each path does
    content_blocks  text and calls of tools -> content blocks, whole or in events
    answer, stream, errors    what is sent

So a conversation gives the same tokens here as over /v1/chat/completions.
"""
