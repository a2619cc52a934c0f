"""The verifier: the target model, and the decoding loop around it.

``engine`` is the loop, ``model`` the target, ``choosing`` goes from logits to tokens. ``attention``, ``kernels`` and
``kv_cache`` compute a pass; ``stages`` splits the layers over processes; ``loading`` reads the weights; ``checks`` tries,
before the first request and afterwards, whether all of it is exact.
"""
