"""Text in and out: stop strings, broken characters, plans, defaults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from services.api.messages import ChatMessage, ClientRequest, RequestedSampling
from services.router.answer import Answer, StopStrings
from services.router.drafters import TrainedDrafter
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig, check_default
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import Progress
from speculation.sources import SOURCES, STRATEGIES
from speculation.types import FinishReason
from tests.engine.fakes import PLAIN, request
from tests.running.refusals import refuses


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What stop strings mean, on the whole text: it ends before whichever is complete first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], max(found, key=len)
    return text, None


letters = st.text(alphabet="ab", max_size=12)


@given(letters, st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3, unique=True))
def test_stop_strings_one_character_at_a_time(text: str, stops: list[str]) -> None:
    matcher, shown, stop = StopStrings(stops), "", None
    for character in text:
        found = matcher.push(character)
        shown += found.text
        if found.stop is not None:
            stop = found.stop
            break
    else:
        shown += matcher.flush()
    assert (shown, stop) == cut(text, stops)


@given(letters, st.integers(1, 4))
def test_pieces_of_any_size_without_a_hit(text: str, size: int) -> None:
    matcher = StopStrings(["abbbbbbbbbbbbba"])
    shown = "".join(matcher.push(text[at : at + size]).text for at in range(0, len(text), size)) + matcher.flush()
    assert shown == text


def test_nothing_that_may_become_a_stop_string_is_shown() -> None:
    matcher = StopStrings(["\n\nEnd"])
    assert matcher.push("Text\n").text == "Text"
    assert matcher.push("\nEn").text == ""
    assert matcher.push("ter").text == "\n\nEnter"


@pytest.mark.parametrize(
    "text", ["plain", "Größe naïve", "東京タワー", "🙂🙃🙂 ok", "a 🙂", "  two  spaces ", "tab\tnewline\n"]
)
def test_detokenising_token_by_token_equals_all_at_once(tiny_model: Path, text: str) -> None:
    tokens = Tokens(str(tiny_model))
    detokenizer = tokens.detokenizer()
    pieces = [detokenizer.push(token) for token in tokens.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("�" in piece for piece in pieces)


def test_a_character_cut_in_two_is_held_back_and_then_marked(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    detokenizer = tokens.detokenizer()
    ids = tokens.encode("a京")
    text = "".join(detokenizer.push(token) for token in ids[:-1])
    assert text == "a"
    assert "�" in detokenizer.flush()


def test_a_stop_string_that_the_end_of_a_character_completes_ends_the_answer(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    ids = tokens.encode("ab京")[:-1]
    answer = Answer(request("r", [1], PLAIN, stop=("b�",)), "r", tokens.detokenizer(), 0.0)
    text = "".join(answer.add(Progress(token_ids=(token,))).text for token in ids) + answer.rest()
    ended = answer.complete(FinishReason.LENGTH, "tiny")
    assert (text, ended.finish_reason, ended.stop) == ("a", FinishReason.STOP, "b�")


def test_byte_fallback_tokenisers_never_break_off(tmp_path: Path) -> None:
    """Llama 2's kind: a character outside the vocabulary is spelt in bytes, which sampling may put together wrongly."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)} | {"a": 256, "b": 257, "\u2581": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    tokens, source = Tokens(str(tmp_path)), random.Random(0)
    for _ in range(300):
        detokenizer = tokens.detokenizer()
        ids = [source.choice([256, 257, 258, source.randrange(256)]) for _ in range(12)]
        text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert text.count("a") >= ids.count(256)
    detokenizer = tokens.detokenizer()
    spelt = [*"é".encode(), 256, *"京".encode()]
    assert "".join(detokenizer.push(token) for token in spelt) + detokenizer.flush() == "éa京"


def test_special_tokens_are_not_text(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    detokenizer = tokens.detokenizer()
    ids = [*tokens.encode("ab"), 0, *tokens.encode("cd"), 0]
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.flush() == "abcd"


def test_chat(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    ids = tokens.encode_chat((ChatMessage(role="user", content="hi"),))
    assert ids == tokens.encode("<|user|>hi<|end|><|assistant|>")
    with refuses(
        InvalidArgument,
        field="messages",
        value="a conversation",
        allowed="what the chat template allows: unknown role wizard",
    ):
        tokens.encode_chat((ChatMessage(role="wizard", content="hi"),))
    with refuses(InvalidArgument, field="messages[0].role", value="empty"):
        tokens.encode_chat((ChatMessage(role="", content="hi"),))
    with refuses(InvalidArgument, field="messages", value="0 messages", allowed="1 to 1024 messages"):
        tokens.encode_chat(())
    with refuses(InvalidArgument, field="prompt", value="empty"):
        tokens.encode("")


def test_missing_tokeniser(tmp_path: Path) -> None:
    with refuses(ConfigurationError, says="cannot load the tokeniser"):
        Tokens(str(tmp_path))


def asking(**given: object) -> ClientRequest:
    return ClientRequest(input="x", sampling=RequestedSampling(), **given)  # type: ignore[arg-type]


def test_a_plan_is_of_the_request_then_of_the_settings() -> None:
    trained = tuple(TrainedDrafter(name=name, source=name) for name, spec in SOURCES.items() if spec.kind == "model")
    config = StrategyConfig(
        strategy="prompt_lookup", num_speculative_tokens=7, retrieval=True, semantic=True, trained=trained
    )
    assert make_plan(asking(), config).max_nodes == 7
    assert make_plan(asking(num_speculative_tokens=3), config).max_nodes == 3
    assert not make_plan(asking(num_speculative_tokens=0), config).speculates
    assert not make_plan(asking(strategy="autoregressive"), config).speculates
    assert make_plan(asking(acceptance="rejection"), config).acceptance == "rejection"
    for name in STRATEGIES:
        assert make_plan(asking(strategy=name), config).strategy == name


@pytest.mark.parametrize("strategy", ["nonsense", ""])
def test_unknown_strategies_are_refused_with_the_known_ones(strategy: str) -> None:
    with refuses(InvalidArgument, field="speculation.strategy") as caught:
        make_plan(asking(strategy=strategy), StrategyConfig())
    assert caught.value.field == "speculation.strategy"
    known = f"one of {', '.join(sorted(STRATEGIES))}"
    assert caught.value.allowed == known
    with refuses(ConfigurationError, field="router.strategy", allowed=known):
        check_default(StrategyConfig(strategy=strategy))


@pytest.mark.parametrize(("theirs", "ours"), [("ngram", "prompt_lookup"), ("EAGLE3", "eagle3"), ("NEXTN", "mtp")])
def test_names_of_other_servers_are_told_by_ours(theirs: str, ours: str) -> None:
    with refuses(ConfigurationError, field="router.strategy", value=theirs, allowed=f"{theirs} of other servers is {ours}"):
        check_default(StrategyConfig(strategy=theirs))


def test_strategies_that_need_an_index_are_refused_without_one() -> None:
    for strategy in ("rest", "spectra", "spectra_retrieval"):
        with refuses(InvalidArgument, field="speculation.strategy", allowed="this server has no retrieval index") as caught:
            make_plan(asking(strategy=strategy), StrategyConfig())
        assert strategy not in str(caught.value).partition("must be")[2].split(", ")
        with refuses(ConfigurationError, field="router.strategy", says="needs an index"):
            check_default(StrategyConfig(strategy=strategy))
    with refuses(
        InvalidArgument, field="speculation.strategy", value="semantic", allowed="this server has no index of hidden states"
    ):
        make_plan(asking(strategy="semantic"), StrategyConfig(retrieval=True))
    with refuses(ConfigurationError, field="router.strategy", value="semantic"):
        check_default(StrategyConfig(strategy="semantic", retrieval=True))
    plan = make_plan(asking(strategy="blend"), StrategyConfig(retrieval=True, semantic=True))
    assert plan.sources[-2:] == ("retrieval", "semantic")
    assert plan.observe_layers
    assert not make_plan(asking(strategy="blend"), StrategyConfig(retrieval=True)).observe_layers
    assert "retrieval" in make_plan(asking(strategy="blend"), StrategyConfig(retrieval=True)).sources
    assert "retrieval" not in make_plan(asking(strategy="blend"), StrategyConfig()).sources


def test_every_strategys_sources_exist() -> None:
    from services.drafter.config import DrafterConfig
    from services.drafter.sources.catalogue import check_names

    for sources in STRATEGIES.values():
        check_names(sources, DrafterConfig())
