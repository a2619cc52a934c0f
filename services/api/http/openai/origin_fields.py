"""``speculation`` of a choice: where its tokens come from, and the passes that brought them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from services.api.http.openai.choice_text import TextToken
from services.api.origins import ReportedPass
from services.in_turns import in_turns
from speculation.types import Report


def origins_of(tokens: Sequence[TextToken], report: Report) -> dict[str, Any]:
    """The field of a choice or event that has these tokens; none where the request does not ask for it.

    A pass is told with the first of its tokens.
    """
    if report == "none":
        return {}
    told: dict[str, Any] = {"tokens": [{"id": each.id, "text": each.text, "source": each.source} for each in tokens]}
    if report == "trees":
        told["passes"] = [pass_fields(each.begins) for each in tokens if each.begins is not None]
    return {"speculation": told}


async def origins_of_all(tokens: Sequence[TextToken], report: Report) -> dict[str, Any]:
    """As ``origins_of``, of all tokens of an answer, which may be many."""
    told = origins_of((), report)
    async for part in in_turns(tokens if told else ()):
        for name, listed in origins_of(part, report)["speculation"].items():
            told["speculation"][name] += listed
    return told


def pass_fields(reported: ReportedPass) -> dict[str, Any]:
    """A pass as JSON."""
    return {
        **dataclasses.asdict(reported.checked),
        "accepted": reported.accepted,
        "committed": reported.committed,
        "dropped": dataclasses.asdict(reported.dropped),
        "pass_s": reported.pass_s,
        "wait_s": reported.wait_s,
        "requests": reported.requests,
    }
