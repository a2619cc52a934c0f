"""Patterns of texts that users set, each with words for those who got one wrong."""

from __future__ import annotations

NAME = r"^[A-Za-z0-9._-]{1,64}$"
RESOURCE = r"^[A-Za-z][A-Za-z0-9_.-]{0,62}$"
ADDRESS = r"^[^:/ ]+:[0-9]{1,5}$|^\[[0-9a-fA-F:]+\]:[0-9]{1,5}$"
URL = r"^https?://[^ ]+$"
ORIGIN = r"^(\*|https?://[^/?#\s*]+)$"
SHA256 = r"^[0-9a-f]{64}$"
# Kubernetes' own.
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?$"
DRIVER = r"^[0-9]{3}(\.[0-9]+){0,2}$"

WORDS = {
    NAME: "1 to 64 letters, digits and characters of ._-",
    RESOURCE: "1 to 63 letters, digits and characters of _.-, a letter first",
    ADDRESS: "HOST:PORT, such as 10.0.0.7:50061",
    URL: "a URL, such as http://127.0.0.1:4317",
    ORIGIN: "* or an origin without a path, such as https://chat.example",
    SHA256: "64 characters of 0-9 and a-f, as `outrider hash-key` prints them",
    QUANTITY: "a quantity of Kubernetes, such as 500m or 16Gi",
    DRIVER: "the version of a driver, such as 580.95.05",
}
