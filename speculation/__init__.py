"""The idea of Outrider, free of models and transports: small drafters propose a tree, the target chooses.

Read in this order: ``types`` and ``messages`` (what is exchanged; ``columns``: of many requests at once), ``room`` (how long
an answer may be), ``sources`` (what drafters need), ``choose`` (the target's own next token), ``tree`` (drafts merged),
``acceptance`` and ``rejection`` (which drafted tokens are kept), ``costs`` and ``budget`` (how many are checked),
``estimators`` (how that is learnt), ``ports`` (who talks to whom). ``services/verifier/engine`` runs it.
"""
