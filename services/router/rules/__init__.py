"""Rules by which the router chooses how a request is drafted.

``facts`` and ``conditions`` are what a rule may ask, ``rule`` is what it sets. ``reading`` reads rules, ``first_match``
finds the one that counts, and ``rule_book`` follows a file of them.
"""
