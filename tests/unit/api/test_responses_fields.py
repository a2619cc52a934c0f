"""The table of the Responses API's fields, and the unit parts of how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.api.http.openai.oldest_turns import Messages, fitting
from services.api.http.responses import field_table
from services.api.http.responses.own_names import OwnNames
from services.api.http.responses.protocol import CreateResponse
from services.api.http.responses.unserved import HINTS, UNSERVED
from services.api.messages import ChatMessage
from speculation.errors import InvalidArgument, PromptTooLong
from tests.running.refusals import refuses

PAGE = Path(__file__).parents[3] / "docs" / "responses_fields.md"


def test_the_page_is_fresh() -> None:
    again = "python -m services.api.http.responses.field_table > docs/responses_fields.md"
    assert PAGE.read_text() == field_table.page(), f"write it with: {again}"


def test_a_field_is_served_or_not() -> None:
    served = {*CreateResponse.model_fields}
    assert not served & {*UNSERVED} and not served & {*HINTS} and not {*UNSERVED} & {*HINTS}


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("messages", "input"),
        ("messages[0].content", "instructions"),
        ("messages[1].content[2].text", "input[0].content[2].text"),
        ("messages[1].name", "input[0]"),
        ("messages[2].tool_calls[0].function.name", "input[3].name"),
        ("tools[7].function.parameters", "tools[7].parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format.type", "text.format.type"),
        ("max_tokens", "max_output_tokens"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("logit_bias.5", "logit_bias.5"),
        ("logprobs", "top_logprobs"),
        ("." * 5000, "." * 5000),
    ],
)
def test_errors_name_the_fields_of_the_request(field: str, own: str) -> None:
    names = OwnNames()
    names.learn("messages[0]", "instructions", whole=True)
    names.learn("messages[1]", "input[0]", whole=True)
    names.learn("messages[1].content", "input[0].content")
    names.learn("messages[2].tool_calls[0].function", "input[3]")
    assert names.of(field) == own


@pytest.mark.parametrize("most", [5, 9, 10, 11, 23, 40])
@pytest.mark.parametrize("instructed", [True, False])
async def test_as_many_turns_as_fit(most: int, instructed: bool) -> None:
    head = (ChatMessage(role="system", content="abc"),) if instructed else ()
    turns = [ChatMessage(role=role, content="x" * size) for role, size in (
        ("user", 7), ("assistant", 4), ("user", 6), ("assistant", 1), ("tool", 2), ("assistant", 3), ("user", 2))]  # fmt: skip
    asked: list[Messages] = []

    async def tokenize(messages: Messages) -> tuple[int, ...]:
        asked.append(messages)
        ids = tuple(ord(char) for each in messages for char in each.content)
        if len(ids) > 20:
            raise PromptTooLong("prompt", f"{len(ids)} characters", "fewer")
        return ids

    found = "".join(map(chr, await fitting((*head, *turns), tokenize, most)))
    starts = [0, 2, 6]
    fits = ["".join(each.content for each in (*head, *turns[start:])) for start in starts]
    assert found == next(text for text in fits if len(text) <= min(most, 20))
    assert len(asked) <= 3 and asked[0] == (*head, *turns)


async def test_what_never_fits_is_refused() -> None:
    async def tokenize(messages: Messages) -> tuple[int, ...]:
        raise PromptTooLong("prompt", "30 tokens", "at most 20 tokens")

    with refuses(PromptTooLong, field="prompt", value="30 tokens"):
        await fitting((ChatMessage(role="user", content="x"),) * 3, tokenize, 20)

    async def wrong(messages: Messages) -> tuple[int, ...]:
        if len(messages) == 3:
            raise PromptTooLong("prompt", "30 tokens", "at most 20 tokens")
        raise InvalidArgument("messages[0].content", "x", "what the template shows")

    with refuses(InvalidArgument, field="messages", value="x"):
        await fitting((ChatMessage(role="user", content="x"),) * 3, wrong, 20)
