"""Forms of messages between verifier and drafter that not every version reads.

While a service is upgraded, the two sides of a draft link may be of different versions. What every version reads may always
be sent. Another form is sent only to a peer that has named it when the stream began, in the metadata of the call or of its
answer. So whoever adds a form to drafting.proto names it here, and asks ``reads`` before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

_KEY = "outrider-drafting-forms"
# Reports and drafts of several sessions in one message, by columns.
COLUMNS = "packed-columns"
# What this version tells its peer.
READ_HERE = ((_KEY, COLUMNS),)


def reads(metadata: Iterable[tuple[str, str | bytes]] | None, form: str) -> bool:
    """Whether the peer that has sent this metadata reads a form."""
    return any(name == _KEY and isinstance(value, str) and form in value.split(",") for name, value in metadata or ())
