"""OpenAI's Responses API.

A request goes through these modules in order::

    protocol          the body and its items, as they are declared; ``unserved`` says what is not served
    conversation      items -> the messages of a chat
    chat_body         the body -> what the chat door reads, and so ``Asked``
    own_names         errors about that chat -> the body's own names
    output_items      text -> the answer's items, and an event for each change of them
    response_answer   items -> the response (``response_object``), whole or in events

``stored_responses`` keeps responses for a while in memory, ``responses_in_redis`` does for several routers, and
``forgetting`` deletes a tenant's; ``input_items`` lists what one of them answered. ``response_endpoints`` is what each
path does.
"""
