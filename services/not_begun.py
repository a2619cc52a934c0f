"""An error that router and verifier both know."""

from __future__ import annotations

from speculation.errors import Unavailable


class NotBegun(Unavailable):
    """No verifier has begun the request, so it cannot have been what failed one: it may be tried again without risk."""
