"""``outrider bench``: every strategy and every peer on the same prompts, by turns, each answer compared token for token.

``run`` is the command; ``lineup`` and ``contestants`` say who takes part, ``measure`` takes the measurements, ``measures``
computes from them, ``report`` and ``plots`` show them; ``compare`` holds two runs side by side.
"""
