"""Names shared by the command line and the settings."""

from __future__ import annotations

# Not a setting: the API key that the command line sends as a client.
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
