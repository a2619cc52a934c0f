"""The pages at ``/`` and ``/docs``: a file each, and the headers under which a browser runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from services.api.http.openai.errors import Headers

PAGE, DOCS = (Path(__file__).with_name(name) for name in ("page.html", "docs.html"))
_SCRIPT, _STYLE = (re.compile(rf"<{tag}>(.*?)</{tag}>".encode(), re.DOTALL) for tag in ("script", "style"))


@cache
def page(file: Path = PAGE) -> tuple[bytes, Headers]:
    """A page, and the headers that it is sent with."""
    content = file.read_bytes()
    return content, [
        ("content-type", "text/html; charset=utf-8"),
        # A newer server may have another page.
        ("cache-control", "no-cache"),
        ("content-security-policy", content_security_policy(content)),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ]


def content_security_policy(content: bytes) -> str:
    """The policy of a page (https://www.w3.org/TR/CSP3/).

    Its own scripts and styles are named by their hashes, and it may ask its own server alone. No other page may frame it.
    Trusted types keep its own code from turning text into HTML.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(_SCRIPT, content)}",
            f"style-src {_hashes(_STYLE, content)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(element: re.Pattern[bytes], content: bytes) -> str:
    digests = (hashlib.sha256(inside).digest() for inside in element.findall(content))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
