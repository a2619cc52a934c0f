"""The front door: everything that a client touches.

``messages`` says what a request and an answer are, whichever way they come, and ``model_card`` what a served model is;
``grpc`` and ``http`` carry them. Whoever watches requests wraps the router as ``passing_router`` does.
"""
