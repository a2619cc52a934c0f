"""Names that the command line and the settings share."""

from __future__ import annotations

# Not a setting: the command line's own credentials as a client.
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
