"""The idea of Outrider, free of models and transports: small drafters propose a tree, the target chooses.

Read in this order: ``types`` and ``messages`` (what is exchanged; ``columns``: of many requests at once; ``prefix``:
how a draft says where it belongs), ``room`` (how long an answer may be), ``sources`` (what drafters need), ``choose``
(the target's own next token; ``philox``: its numbers), ``tree`` (drafts merged), ``acceptance`` and ``rejection``
(which drafted tokens are kept; ``acceptance_rates``: how likely that was; ``replay``: of an answer that is known),
``costs`` and ``budget`` (how many are checked), ``estimators`` (how that is learnt), ``ports`` (who talks to whom).
Then ``adapters`` and ``reloads`` (other weights), ``held_models`` (what a drafter elsewhere holds), ``successor_table``
and ``colours``, and what all share: ``errors``, ``limits``, ``files``, ``records``. ``services/verifier/engine`` runs
it.
"""
