"""Errors that router and verifier's link both know: the request cannot have been what failed a verifier."""

from __future__ import annotations

from speculation.errors import Unavailable


class NotBegun(Unavailable):
    """No verifier has begun the request, so it cannot have been what failed one: it may be tried again without risk."""


class NodeTaken(Unavailable):
    """The verifier's machine was taken away in the middle of the request, in order: no sign against the request."""
