"""Parts of the HTTP API by themselves: tools in text cut anywhere, tokens and their text, spelling, templates."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models
from typing_extensions import override

from services.api.http.openai.choice_text import ChoiceText, TextToken
from services.api.http.openai.usage import metrics
from services.api.messages import ChatMessage, ChatOptions, TextChunk
from services.logs.printable import printable, printable_line
from services.model_files.byte_letters import TokenBytes
from services.router.templates import ChatTemplate
from services.router.tokens import Tokens
from speculation.errors import InvalidArgument
from speculation.types import SpeculationStats
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_tokenizer
from tests.unit.api.test_gate import completion


def chunks(source: random.Random, text: str) -> list[TextChunk]:
    """A text of single characters, some of which take several tokens, told with a delay."""
    ends: list[int] = []
    for at in range(len(text)):
        ends += [at] * source.randrange(3) + [at + 1]
    made, shown, taken = [], 0, 0
    while taken < len(ends):
        count = source.randrange(1, 5)
        part = ends[taken : taken + count]
        until = max(shown, part[-1] - source.randrange(4))
        made.append(TextChunk(text=text[shown:until], token_ids=(*range(taken, taken + len(part)),), text_ends=(*part,)))
        shown, taken = until, taken + count
    return [*made, TextChunk(text=text[shown:], token_ids=())]


@pytest.mark.parametrize("interval", [None, 1, 2, 5])
def test_pieces_are_tokens_and_their_text(interval: int | None) -> None:
    source = random.Random(2)
    for _ in range(200):
        text = "".join(source.choice("abc京") for _ in range(source.randrange(1, 20)))
        cut = ChoiceText(interval)
        pieces = [piece for chunk in chunks(source, text) for piece in cut.push(chunk)]
        pieces += cut.finish(None, include_stop=False)
        assert "".join(piece.text for piece in pieces) == text
        tokens = [token for piece in pieces for token in piece.tokens]
        assert [token.id for token in tokens] == [*range(len(tokens))] and len(tokens) == cut.tokens
        for piece in pieces:
            assert "".join(token.text for token in piece.tokens) == piece.text
        if interval is not None:
            assert all(len(piece.tokens) == interval for piece in pieces[:-1])
            assert 1 <= len(pieces[-1].tokens) <= interval


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_tokens_too(include: bool) -> None:
    cut = ChoiceText(None)
    # "ab" "cS" "TO" "P!" with the stop string STOP.
    pieces = cut.push(TextChunk(text="ab", token_ids=(1,), text_ends=(2,)))
    pieces += cut.push(TextChunk(text="c", token_ids=(2, 3, 4), text_ends=(4, 6, 8)))
    pieces += cut.finish("STOP", include_stop=include)
    assert "".join(piece.text for piece in pieces) == ("abcSTOP" if include else "abc")
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.id for token in tokens] == [1, 2, 3, 4]
    assert [token.id for token in tokens if token.shown] == ([1, 2, 3, 4] if include else [1, 2])


@pytest.mark.parametrize("ended", [True, False])
def test_the_same_tokens_belong_to_a_stop_string_however_they_come(ended: bool) -> None:
    """Chunks are as long as steps have tokens, so drafts must not decide."""
    for seed in range(200):
        source = random.Random(seed)
        # What each token adds: nothing within a character, and for a special token.
        texts = [source.choice(("", "", "a", "bc")) for _ in range(12)] + [""] * source.randrange(3)
        ends = [len("".join(texts[: at + 1])) for at in range(len(texts))]
        # With the stop string's first character ends what is told.
        whole = "".join(texts)
        end = source.randrange(len(whole) + 1) if ended else len(whole)
        found = []
        for _ in range(4):
            cut, taken, told, tokens = ChoiceText(source.choice((None, 1, 3)), stops=True), 0, 0, list[Any]()
            while taken < len(texts):
                count = source.randint(1, 4)
                # Held back is what may begin the stop string.
                until = max(told, min(end, ends[min(taken + count, len(ends)) - 1]) - source.randrange(2))
                part = range(taken, min(taken + count, len(texts)))
                tokens += cut.push(
                    TextChunk(
                        text=whole[told:until],
                        token_ids=(*part,),
                        text_ends=tuple([ends[at] for at in part]),
                        incomplete=texts[part[-1]] == "" and source.random() < 0.5,
                    )
                )
                taken, told = taken + count, until
            tokens += cut.push(TextChunk(text=whole[told:end], token_ids=()))
            tokens += cut.finish("stop" if ended else None, include_stop=False)
            found.append([(token.id, token.text, token.shown) for piece in tokens for token in piece.tokens])
        assert all(other == found[0] for other in found), (seed, texts, end)


class _Looked(deque[TextToken]):
    """Counts how many of its items are looked at."""

    count = 0

    @override
    def __iter__(self) -> Iterator[TextToken]:
        for each in super().__iter__():
            self.count += 1
            yield each


def test_tokens_without_text_are_not_looked_at_again() -> None:
    cut, looked, most = ChoiceText(None, stops=True), _Looked(), 500
    cut._waiting = looked
    for token in range(most):
        assert not cut.push(TextChunk(text="", token_ids=(token,), text_ends=(0,)))
    (piece,) = cut.push(TextChunk(text="a", token_ids=(most,), text_ends=(1,)))
    assert len(piece.tokens) == most + 1 and looked.count <= 3 * most


def test_bytes_of_tokens(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    tokens = Tokens(str(tmp_path))
    for text in ("the quick brown fox", "Größe 東京 🙂", "\n\t  x"):
        assert b"".join(each.data for each in tokens.spell(tokens.encode(text))) == text.encode()
    (special,) = tokens.spell([0])
    assert special.special and special.data == b"<|end|>"
    vocabulary = {"▁the": 0, "<0xE6>": 1, "x": 2, "<unk>": 3}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenBytes(pieces).spell(number) for number in (0, 1, 2, 99)] == [b" the", b"\xe6", b"x", b""]


TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | length }}{% endif %}{% if mood is defined %}({{ mood }}){% endif %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def with_template(folder: Path, template: str) -> Tokens:
    make_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokens(str(folder))


def test_what_a_template_is_given(tmp_path: Path) -> None:
    tokens = with_template(tmp_path, TEMPLATE)
    # It shows tools, but writes calls in no form that is read.
    assert tokens.conversations.tool_format == ""

    def rendered(*messages: ChatMessage, **options: object) -> str:
        return tokens.decode(tokens.encode_chat(messages, ChatOptions(**options)))  # type: ignore[arg-type]

    user = ChatMessage(role="user", content="hi")
    assert rendered(user) == "[user|hi|]>"
    assert rendered(user, tools='[{"type": "function"}]') == "<tool_call>1[user|hi|]>"
    assert rendered(user, template_kwargs='{"mood": "good"}', add_generation_prompt=False) == "(good)[user|hi|]"
    called = ChatMessage(role="assistant", content="", tool_calls='[{"function": {"name": "f", "arguments": {"a": 7}}}]')
    assert rendered(user, called) == "[user|hi|][assistant||f7]>"
    begun = ChatMessage(role="assistant", content="I say [x] ")
    assert (
        rendered(user, begun, continue_final_message=True, add_generation_prompt=False) == "[user|hi|][assistant|I say [x] "
    )
    with refuses(
        InvalidArgument,
        field="chat_template_kwargs.colour",
        value="red",
        allowed="unset: of such options, this model's chat template reads: mood",
    ):
        rendered(user, template_kwargs='{"colour": "red"}')
    with refuses(InvalidArgument, field="messages[0].name", value="Ann"):
        rendered(ChatMessage(role="user", content="a", name="Ann"))


def test_a_template_that_trims_what_is_continued() -> None:
    messages = [{"role": "assistant", "content": "so it "}]
    assert ChatTemplate("<{{ messages[0].content | trim }}>", {}).render(messages, continue_final_message=True) == "<so it"
    with pytest.raises(jinja2.TemplateError, match="does not show the end"):
        ChatTemplate("nothing", {}).render(messages, continue_final_message=True)


def test_messages_are_one_printable_line() -> None:
    assert printable("a\nb\x00c" + "d" * 2000, 1000) == "a b c" + "d" * 992 + "..."
    assert json.dumps(printable("Größe", 5)) == '"Gr\\u00f6\\u00dfe"'
    assert printable_line(" a\n\n b\x1b[0m " + "c" * 50, 20) == "a b [0m ccccccccc..."
    assert printable_line("a\nb", 3) == "a b"


def test_an_answer_says_what_was_left_out_and_why() -> None:
    ends = [
        replace(completion(1, 2), stats=SpeculationStats(switches=[each])) for each in ("8: fspad left out", "40: recycling")
    ]
    assert metrics(ends, "none")["speculative_decoding"]["switches"] == ["8: fspad left out", "40: recycling"]


def test_passes_are_counted_by_what_they_drafted_and_had_accepted() -> None:
    counted = [SpeculationStats(num_spec_tokens=3), SpeculationStats(num_spec_tokens=3)]
    for stats, drafted, accepted in ((0, 1, 1), (0, 3, 2), (1, 3, 2), (1, 0, 0)):
        counted[stats].record(drafted=drafted, accepted_sources=("suffix",) * accepted, committed=accepted + 1)
    ends = [replace(completion(1, 2), stats=stats) for stats in counted]
    told = metrics(ends, "sources")["speculative_decoding"]
    assert (told["num_spec_tokens"], told["acceptance_histogram"]) == (3, [1, 1, 2, 0])
    assert told["acceptance_histogram_by_draft_length"] == {1: [0, 1], 3: [0, 0, 2, 0]}
    assert "acceptance_histogram_by_draft_length" not in metrics(ends, "none")["speculative_decoding"]


def test_what_was_saved_is_added_up_over_all_choices() -> None:
    ends = [replace(completion(1, 2), stats=SpeculationStats(seconds_saved=seconds)) for seconds in (0.5, -0.75)]
    assert metrics(ends, "none")["speculative_decoding"]["seconds_saved"] == -0.25
