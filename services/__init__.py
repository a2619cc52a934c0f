"""The components, and what they share.

``api`` is the front door, ``router``, ``drafter``, ``retrieval`` and ``verifier`` are the components, which meet only in
``speculation.ports``; ``links`` joins them. ``model_files`` reads a model's folder for all of them.
"""
