"""What is too long is refused before it is tokenised; what nobody waits for is not tokenised; all others wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from services.api.http.openai.token_requests import read_tokenize
from services.api.messages import ChatMessage, ClientRequest, RequestedSampling
from services.fair_threads import FairThreads
from services.router.config import RouterConfig
from services.router.conversations import Conversations
from services.router.named_templates import ChatTemplates
from services.router.preparing import Preparation
from services.router.rules.rule_book import RuleBook
from services.router.service import RouterService
from services.router.tokens import Tokens
from services.verifier.grammar.compiled_grammars import CompiledGrammars
from speculation.errors import InvalidArgument, NotBegun, PromptTooLong, ResourceExhausted
from speculation.messages import VerifierCard
from speculation.types import SamplingParams, StructuredOutputs
from tests.running.lock_held import longest_gap
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_tokenizer


def test_special_tokens_around_a_text_can_be_left_out(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>", special_tokens=[("<|user|>", 1), ("<|end|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = Tokens(str(tmp_path))
    assert tokens.encode("fox") == (1, *tokens.encode("fox", special=False), 0)
    asked = {special: read_tokenize({"prompt": "fox", "add_special_tokens": special})[1] for special in (None, True, False)}
    assert [request.add_special_tokens for request in asked.values()] == [True, True, False]


class Card:
    """The part of ``VerifierPort`` that a router needs to prepare a request."""

    async def describe(self) -> VerifierCard:
        return VerifierCard(
            model="tiny",
            max_model_len=32,
            vocab_size=512,
            running=0,
            waiting=0,
            free_blocks=1,
            total_blocks=1,
            bit_exact=True,
        )


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        ("x" * (4 << 20), ("prompt", "4194304 characters")),
        (
            (ChatMessage(role="user", content="x" * 9), ChatMessage(role="user", content="x" * (4 << 20))),
            ("prompt", "4194321 characters"),
        ),
        ((5,) * 32, ("prompt", "32 tokens")),
    ],
    ids=["text", "chat", "ids"],
)
async def test_too_long_is_refused_before_it_is_tokenised(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, source: str | tuple[int, ...], refusal: tuple[object, ...]
) -> None:
    router = RouterService(RouterConfig(model_path=str(tiny_model)), Card())  # type: ignore[arg-type]

    def never(*_: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Preparation, "encode", never)
    request = ClientRequest(input=source, sampling=RequestedSampling())
    with refuses(PromptTooLong, *refusal):
        await anext(router.generate(request))
    with refuses(PromptTooLong, *refusal):
        await router.tokenize(request)


@pytest.mark.exhaustive
def test_others_run_while_a_long_text_is_tokenised(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    text = "the quick brown fox " * 100_000
    took, gap = longest_gap(lambda: tokens.encode(text))
    assert gap < took / 3, (gap, took)
    ids = tokens.encode(text) * 4
    took, gap = longest_gap(lambda: tokens.decode(ids))
    assert gap < took / 3, (gap, took)
    assert tokens.decode(ids[:5000]) == text[: len(tokens.decode(ids[:5000]))]


def test_no_text_that_fits_is_refused_by_its_length(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    for text in ("the quick brown fox " * 20, "é" * 50, "   " * 40):
        tokens.check_length(text, len(tokens.encode(text)) + 1)


async def test_what_nobody_waits_for_is_not_done() -> None:
    pool, go = FairThreads("tokenising", 1), threading.Event()
    done: list[str] = []

    def work(name: str) -> str:
        go.wait(60)
        done.append(name)
        return name

    running, left, stays = (asyncio.create_task(pool.run(partial(work, name), 10)) for name in ("running", "left", "stays"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    go.set()
    assert await asyncio.gather(running, stays) == ["running", "stays"]
    assert done == ["running", "stays"]


async def test_an_error_that_nobody_waits_for_is_not_logged() -> None:
    pool, begun, go, logged = FairThreads("tokenising", 1), threading.Event(), threading.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def fails() -> None:
        begun.set()
        go.wait(60)
        raise InvalidArgument("prompt", "x", "y")

    left = asyncio.create_task(pool.run(fails, 1))
    await asyncio.to_thread(begun.wait, 60)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    del left
    go.set()
    assert await pool.run(lambda: True, 1)
    gc.collect()
    assert not logged


async def test_a_turn_that_comes_to_one_who_leaves_goes_on_to_the_next() -> None:
    pool, go = FairThreads("tokenising", 1), threading.Event()
    running = asyncio.create_task(pool.run(lambda: go.wait(60), 1))
    await asyncio.sleep(0)
    leaves, stays = (asyncio.create_task(pool.run(lambda: True, 1)) for _ in range(2))
    await asyncio.sleep(0)
    go.set()
    await running
    # Its turn has come, and it has not run yet.
    leaves.cancel()
    assert await asyncio.wait_for(stays, 60)
    assert await pool.run(lambda: True, 1)


async def test_a_burst_waits() -> None:
    pool = FairThreads("tokenising", 3)
    assert await asyncio.gather(*(pool.run(lambda: True, 10, "one") for _ in range(2000))) == [True] * 2000


async def test_one_tenants_texts_leave_room_for_those_of_others() -> None:
    pool, go = FairThreads("tokenising", 1), threading.Event()
    done: list[str] = []
    first = asyncio.create_task(pool.run(lambda: go.wait(60), 1))
    await asyncio.sleep(0)
    asked = [("greedy", 100)] * 3 + [("other", 60)] * 3
    tasks = [asyncio.create_task(pool.run(partial(done.append, name), size, name)) for name, size in asked]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, *tasks)
    assert done == ["greedy", "other", "other", "greedy", "other", "greedy"]


async def test_no_tenant_has_all_threads() -> None:
    """A long text cannot be stopped: were it in every thread, others would wait for as long as it takes."""
    pool, go = FairThreads("tokenising", 3), threading.Event()
    greedy = [asyncio.create_task(pool.run(lambda: go.wait(60), 10**6, "greedy")) for _ in range(8)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(pool.run(lambda: "at once", 10, "other"), 10) == "at once"
    # Nor by going away: the work that has begun goes on, and counts.
    for task in greedy[:4]:
        task.cancel()
    await asyncio.gather(*greedy[:4], return_exceptions=True)
    assert await asyncio.wait_for(pool.run(lambda: "at once", 10, "other"), 10) == "at once"
    go.set()
    assert await asyncio.gather(*greedy[4:]) == [True] * 4
    # A tenant alone has more than one of them.
    both = threading.Barrier(2)
    assert sorted(await asyncio.gather(*(pool.run(lambda: both.wait(60), 10, "greedy") for _ in range(2)))) == [0, 1]
    assert not pool._of


async def test_callers_that_go_together_leave_nothing() -> None:
    pool, go = FairThreads("tokenising", 1), threading.Event()
    running = asyncio.create_task(pool.run(lambda: go.wait(60), 1, "one"))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(pool.run(lambda: True, 1, name)) for name in ("one", "two", "two") for _ in range(500)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert list(pool._of) == ["one"]
    go.set()
    await running
    assert await pool.run(lambda: True, 1, "two")
    await asyncio.sleep(0)
    assert not pool._of


async def test_a_machine_without_threads_takes_no_turn_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FairThreads("tokenising", 1)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        for _ in range(3):
            with pytest.raises(ResourceExhausted, match=r"^no thread can be started \("):
                await pool.run(lambda: True, 1, "one")
    assert not pool._of
    assert await asyncio.wait_for(pool.run(lambda: True, 1, "one"), 60)


async def test_tokens_that_no_answer_could_have_are_not_spelt_out(tiny_model: Path) -> None:
    router = RouterService(RouterConfig(model_path=str(tiny_model)), Card())  # type: ignore[arg-type]
    assert await router.detokenize((5,) * 32)
    with refuses(
        PromptTooLong,
        field="tokens",
        value="33 tokens",
        allowed="at most 32 tokens (this model's maximum context length is 32 tokens)",
    ):
        await router.detokenize((5,) * 33)


def test_what_a_template_says_is_clipped_and_plain(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(str(tiny_model))
    template = "{{ raise_exception('bad\x1b[31m\n\x00' ~ messages[0]['content']) }}"
    monkeypatch.setattr(tokens, "conversations", Conversations(ChatTemplates({"default": template}, {}), generic=True))
    with pytest.raises(InvalidArgument) as caught:
        tokens.encode_chat([ChatMessage(role="user", content="\x07y" * 50_000)])
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert "bad" in str(caught.value)


@pytest.mark.parametrize("penalty", [1e-38, 0.0, 0.009])
def test_penalties_that_overflow_are_refused(penalty: float) -> None:
    with refuses(InvalidArgument, field="repetition_penalty", allowed="a finite number from 0.01 to 10"):
        RequestedSampling(repetition_penalty=penalty)


async def test_grammars_of_one_tenant_delay_those_of_others_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take the engine half a second, and a tenant may send as many as it has requests."""
    grammars, go, opened = CompiledGrammars(str(tiny_model), 320, frozenset({0})), threading.Event(), list[str]()

    def open_one(structured: StructuredOutputs, _: object) -> None:
        assert go.wait(PATIENCE_S)
        opened.append(structured.text)

    monkeypatch.setattr(grammars, "_open", open_one)

    async def asked(text: str, tenant: str) -> None:
        await grammars.open(SamplingParams(structured_outputs=StructuredOutputs(kind="regex", text=text)), (), tenant)

    calls = [asyncio.create_task(asked(*each)) for each in [("a", "greedy")] * 6 + [("b", "other")] * 2]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*calls)
    grammars.stop()
    assert [at for at, text in enumerate(opened) if text == "b"] in ([1, 3], [2, 4])


async def test_what_choices_have_in_common_is_tokenised_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    own = Tokens.encode_answer
    monkeypatch.setattr(Tokens, "encode_answer", lambda self, text: (read.append(text), own(self, text))[1])
    tokens = Tokens(str(tiny_model))
    config = RouterConfig(model_path=str(tiny_model))
    preparation = Preparation(config, tokens, RuleBook(config), None)
    card = await Card().describe()

    def asked(tenant: str) -> None:
        sampling = RequestedSampling(max_tokens=1, bad_words=("fox",))
        request = ClientRequest(input="a", sampling=sampling, prediction="the quick brown fox", tenant=tenant)
        made = preparation.prepare(request, card, 0).request
        assert made.prediction == own(tokens, "the quick brown fox") and len(made.sampling.bad_words) == 2

    for _ in range(3):
        asked("one")
    assert read.count("the quick brown fox") == read.count("fox") == 1
    # Nobody's are quicker for what another has sent, nor for what was to be forgotten.
    asked("other")
    preparation.forget()
    asked("one")
    assert read.count("the quick brown fox") == read.count("fox") == 3


async def test_who_waits_when_threads_are_stopped_hears_of_it() -> None:
    pool, go = FairThreads("tokenising", 1), threading.Event()
    running, *waiting = (asyncio.create_task(pool.run(lambda: go.wait(60), 1)) for _ in range(3))
    await asyncio.sleep(0)
    pool.stop()
    go.set()
    assert await running
    told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert [type(each) for each in told] == [NotBegun] * 2
