"""The text of a prompt that was cut is that of the tokens that the model is shown, but for those around it."""

from __future__ import annotations

import pytest
from typing_extensions import override

from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.preparing import prepare
from services.api.messages import ClientRequest, RequestedSampling
from tests.servers.scripted_router import CARD, ScriptedRouter


class _Around(ScriptedRouter):
    """Its tokenizer puts two tokens before a text and one behind, of which a text may have the first itself."""

    @override
    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        ids = await super().tokenize(request)
        return (1, 2, *ids, 3) if request.add_special_tokens and isinstance(request.input, str) else ids


@pytest.mark.parametrize(
    ("side", "kept", "shown"),
    [
        ("left", 4, "\x01cd"), ("left", 6, "ab\x01cd"), ("left", 7, "ab\x01cd"), ("left", 1, ""), ("left", 8, "ab\x01cd"),
        ("right", 4, "ab"), ("right", 5, "ab\x01"), ("right", 7, "ab\x01cd"), ("right", 1, ""),
    ],
)  # fmt: skip
async def test_what_is_shown(side: str, kept: int, shown: str) -> None:
    router = _Around().with_card(special_tokens={"<s>": 1, "<t>": 2, "</s>": 3})
    base = ClientRequest(input="", sampling=RequestedSampling())
    asked = read_completion(
        {"prompt": "ab\x01cd", "echo": True, "truncate_prompt_tokens": kept, "truncation_side": side, "max_tokens": 5}
    )
    assert (await prepare(asked, CARD, router, base)).echoed == (shown,)
