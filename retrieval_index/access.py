"""The Redis of indexes: its URL as messages may show it, and who needs what of it.

It has one user for the services that read an index, and one for whoever publishes it. Routers, verifiers and drafters ask
it for nothing. The chart makes both users, and docs/how-to/retrieval.md shows how to.
"""

from __future__ import annotations

from urllib.parse import urlsplit

# Of services: the live version and its predecessor, its manifest and pieces, the stream of changes.
READER = ("get", "lrange", "xread", "xrevrange")
# Of the same where they keep earlier answers (``retrieval.answers_tokens``), on the keys of answers alone.
KEEPER = (
    *("get", "set", "del", "pexpire", "time", "xadd", "xdel", "xrange", "xrevrange"),
    *("watch", "unwatch", "multi", "exec"),
)
_ANSWERS = ("answers", "generation")
# Of ``outrider index publish``, ``list``, ``promote``, ``rollback`` and ``delete``.
PUBLISHER = (
    *READER,
    *("set", "del", "exists", "scan", "pexpire", "lpush", "lrem", "ltrim", "xadd"),
    *("watch", "unwatch", "multi", "exec"),
)


def rules(commands: tuple[str, ...], name: str) -> str:
    """The rules of ACL SETUSER of a user who may run these commands on the keys of the index ``name``, and nothing else."""
    return " ".join((f"~outrider:{{{name}}}:*", "-@all", *(f"+{command}" for command in commands)))


def keeper_rules(name: str) -> str:
    """What ``rules`` of a reader lacks where answers are kept: a selector, as of Redis 7, for the keys of answers."""
    keys = (f"~outrider:{{{name}}}:{kind}:*" for kind in _ANSWERS)
    return f"({' '.join((*keys, '-@all', *(f'+{command}' for command in KEEPER)))})"


def without_password(url: str) -> str:
    """Scheme, host, port and database of a URL."""
    try:
        parts = urlsplit(url)
        # An odd URL most often holds a password that was not escaped.
        if parts.hostname is None or parts.fragment or "@" in parts.path:
            raise ValueError
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a Redis URL that cannot be read (are special characters of the password escaped?)"
    user = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{user}{host}{port}{parts.path}"
