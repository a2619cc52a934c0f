"""Notes which drafts are missing in the coming step for requests that follow their paper's rule, and why. Uses no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.verifier.engine.drafting import Drafting
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.switches import Why
from speculation.sources import draft_groups, runs_model


def source_names(sources: Sequence[str]) -> dict[str, str]:
    """What answers call the drafts of each group: texts are drafted from together.

    Example:
        >>> source_names(("suffix", "eagle3", "recycling"))
        {'eagle3': 'eagle3', 'text': 'suffix and recycling'}
    """
    texts = " and ".join(name for name in sources if not runs_model(name))
    return {group: group if group in sources else texts for group in draft_groups(sources)}


def note_undrafted(requests: Iterable[LiveRequest], drafting: Drafting, cut: Why) -> None:
    """Note the drafts that are missing once a step has waited for them.

    Args:
        requests: of the coming pass.
        cut: what ended the wait for drafts that may still come.
    """
    for request in requests:
        if not (request.by_paper and request.decoding and request.max_nodes) or request.closed:
            continue
        names = source_names(request.sources)
        request.switches.begin_step([*names.values()])
        for origin, mailbox in request.mailboxes.items():
            for group, why in _missing(request, origin, mailbox, drafting, cut).items():
                # An origin that has named no group drafts from everything.
                for name in [names[group]] if group in names else names.values():
                    request.switches.without(request.generated, name, why)


def _missing(request: LiveRequest, origin: str, mailbox: Mailbox, drafting: Drafting, cut: Why) -> dict[str, Why]:
    """The groups of an origin without a draft for the coming step."""
    if mailbox.given_up:
        return dict.fromkeys(mailbox.groups, "failed")
    if missing := mailbox.missing(request.tokens):
        if not drafting.connected(origin):
            return dict.fromkeys(missing, "lost")
        return {group: "silent" if drafting.experience_of(origin, group).silent else cut for group in missing}
    if mailbox.find(request.tokens):
        return {}
    if mailbox.refused(len(request.tokens)):
        return dict.fromkeys(mailbox.groups, "failed")
    return dict.fromkeys(mailbox.groups, "silent" if drafting.connected(origin) else "lost")
