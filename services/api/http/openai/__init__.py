"""OpenAI's requests and answers.

A request goes through these modules in order::

    protocol        declares all fields, and the answers
    fields          JSON -> fields, each of which is taken within what is declared, or refused
    chat_request, completion_request    fields -> ``Asked``
    preparing       ``Asked`` -> one ``ClientRequest`` for each choice; ``running_choices`` runs them side by side
    choice_text     their chunks -> pieces of text with their tokens
    chat_answer, completion_answer      pieces -> JSON, whole or in events

Nothing that a user sends is ignored: a field is honoured, or refused by name.
"""
