"""The idea of Outrider, free of models and transports: small drafters propose a tree, the target chooses.

Read in this order:

1. ``types``, ``messages``            what is exchanged; ``columns`` has it for many requests at once,
                                      ``id_rows`` the likely ids of a pass
2. ``prefix``, ``room``               where a draft belongs, and how long an answer may be
3. ``sources``                        what drafters need
4. ``choose``, ``philox``             the target's own next token, and its random numbers
5. ``tree``                           drafts, merged
6. ``acceptance``, ``rejection``      which drafted tokens are kept; ``acceptance_rates``: how likely that is
7. ``costs``, ``budget``              how many drafted tokens are checked
8. ``estimators``, ``replay``         how that is learnt, and what a known answer shows of other drafts
9. ``ports``                          who talks to whom

Then ``adapters`` and ``reloads`` (other weights), ``held_models`` (what a drafter elsewhere holds), ``successor_table``,
``colours``, and what all share: ``errors``, ``limits``, ``files``, ``records``,
``arrays``. ``services/verifier/engine`` runs it.
"""
