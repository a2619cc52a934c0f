"""The components. ``router``, ``drafter`` and ``verifier`` meet only in ``speculation.ports``; ``links`` joins them."""
