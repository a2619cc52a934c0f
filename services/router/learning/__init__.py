"""What the router learns of the requests that nobody has chosen a strategy for: in which context (``contexts``), what each
strategy would have taken (``compared_cost``, ``counts``), which one is chosen (``choice``), when answers are replayed
(``spare_time``), and where routers meet (``counts_in_redis``). ``learning`` is what the router sees of it."""
