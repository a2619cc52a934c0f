"""The idea of Outrider, free of models and transports: small drafters propose a tree, the target chooses.

Read in this order: ``types`` (what is exchanged), ``choose`` (the target's own next token), ``tree`` (drafts merged),
``acceptance`` and ``rejection`` (which drafted tokens are kept), ``budget`` (how many are checked), ``ports`` (who talks
to whom), ``batch`` and ``loop`` (the whole thing in motion).
"""
