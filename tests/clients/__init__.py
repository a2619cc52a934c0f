"""Real clients against a real server: ``make test-clients``, or ``python -m tests.clients openai anthropic``.

``python/`` and ``node/`` have a file for each client, which runs in an environment of its own: its first comment pins the
packages that it needs. A run goes through these modules::

    scripts       a file -> which packages it needs, and how it is run
    servers       the default model, and the same one with a chat template that has tools
    recorder      stands between client and server, and keeps what the client asks for
    plain_http    asks the server the same again, without the client
    judging       what the client gave its user is what plain HTTP gives
    table         docs/clients.md

A test (tests/unit/sdk/test_clients_page.py) checks that the page and the files agree; the run itself is no part of the tests.
"""
