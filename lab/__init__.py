"""Experiments whose findings stand in docs/log.md. Not installed; run from a checkout: ``python -m lab.NAME``."""
