"""What the router learns of requests for which nobody has chosen a strategy. ``learning`` is what the router sees of it.

``contexts`` sorts requests. ``compared_cost`` and ``counts`` hold what each strategy would have taken; ``choice`` picks one.
``spare_time`` says when answers are replayed. Routers share what they know through ``counts_in_redis``.
"""
