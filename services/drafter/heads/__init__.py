"""Drafters that read the target's hidden states.

``eagle`` (EAGLE-1, 2 and 3, HASS, FSPAD), ``medusa`` and ``streams`` are the kinds; ``files`` reads their checkpoints,
``canary`` tries them before they serve. What is here serves all of them: layers, caches, how a tree grows.
"""
