"""Bodies, answers and errors, each field declared once: its type, its bounds and what it means.

From here come the bounds that a body is read with (``openai/fields.py``), /openapi.json and docs/openai_fields.md::

    marks               what becomes of a field: honoured, without effect, refused
    parts, messages, tools    objects within bodies
    shared_body         what the bodies of chat and text completions share
    chat_body, completion_body, token_bodies    the bodies
    answers, service_answers    what is answered
"""
