"""``outrider bench never-slower``: is any load slower with drafting than without it?

``cells`` is the grid, ``kinds`` and ``builtin_prompts`` say what is asked, ``requests`` makes requests of it; ``load`` keeps
them in flight, ``rounds`` lets plain decoding and the strategies take turns, ``same_answers`` compares their tokens and
``same_work`` their times; ``run`` goes through the grid. ``verdict`` judges what was recorded, ``record_file`` keeps it,
``report`` shows it.
"""
