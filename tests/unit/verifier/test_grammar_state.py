"""A request's grammar: what it allows after any path is what a fresh matcher says, whatever was asked before."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from services.structured_outputs.grammars import engine_text
from services.verifier.grammar import compiled_grammars
from services.verifier.grammar.compiled_grammars import CompiledGrammars
from services.verifier.grammar.drafts_within import within_grammar
from services.verifier.grammar.grammar_state import GrammarState
from speculation.errors import Internal, InvalidArgument
from speculation.sources import GRAMMAR
from speculation.tree import path_to
from speculation.types import GrammarKind, SamplingParams, StructuredOutputs, TokenTree
from tests.running.refusals import refuses
from tests.servers.answer_forms import FORMS, grammar_state, letters

VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> LLTokenizer:
    return LLTokenizer(Tokenizer.from_file(str(tiny_model / "tokenizer.json")).to_str(), n_vocab=VOCAB, eos_token=[0])


@pytest.fixture
def compiled(tiny_model: Path) -> Iterator[CompiledGrammars]:
    made = CompiledGrammars(str(tiny_model), VOCAB, frozenset({0}))
    yield made
    made.stop()


def state_of(tokenizer: LLTokenizer, kind: str) -> GrammarState:
    structured = FORMS[kind].structured
    return grammar_state(tokenizer, frozenset({0}), structured.kind, structured.text)


@cache
def unused(tokenizer: LLTokenizer, kind: str) -> LLMatcher:
    return LLMatcher(tokenizer, engine_text(FORMS[kind].structured), log_level=0)


def dense(tokenizer: LLTokenizer, kind: str, tokens: list[int]) -> set[int] | None:
    """What is allowed after ``tokens``, by a matcher that sees nothing else; None: they are not allowed themselves."""
    matcher = unused(tokenizer, kind).deep_copy()
    if not all(matcher.consume_token(token) for token in tokens):
        return None
    return ids(matcher.compute_bitmask())


def ids(bits: bytes | np.ndarray | None) -> set[int]:
    assert bits is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


def some_tree(source: random.Random, tokenizer: LLTokenizer, kind: str, committed: list[int]) -> TokenTree:
    """A tree of which most nodes are allowed."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for node in range(source.randint(0, 24)):
        parent = source.randint(-1, node - 1)
        before = [] if parent == -1 else paths[parent]
        allowed = dense(tokenizer, kind, [*committed, *before])
        right = allowed and source.random() < 0.8
        token = source.choice(sorted(allowed)) if allowed and right else source.randrange(VOCAB)
        tokens.append(token)
        parents.append(parent)
        paths.append([*before, token])
    probes = tuple(node for node in range(len(tokens)) if node not in parents and source.random() < 0.2)
    return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=("any",) * len(tokens), probes=probes)


@pytest.mark.examples(2)
@pytest.mark.parametrize("kind", FORMS)
def test_any_tree_in_any_order_gives_what_fresh_matchers_say(tokenizer: LLTokenizer, kind: str) -> None:
    source = random.Random(kind)
    for _ in range(2 if kind == "json" else 4):
        state, committed = state_of(tokenizer, kind), list[int]()
        while True:
            tree = some_tree(source, tokenizer, kind, committed)
            nodes = list(range(-1, len(tree)))
            source.shuffle(nodes)
            for node in nodes:
                path = [tree.tokens[step] for step in path_to(tree, node)]
                wanted = None if 0 in path else dense(tokenizer, kind, [*committed, *path])
                found = state.allowed(path)
                assert (found is None) == (wanted is None), (committed, path)
                if wanted is not None:
                    assert ids(found) == wanted
            check_fitted(tree, within_grammar(tree, state, 16), tokenizer, kind, committed)
            if demanded := state.forced(4):
                assert dense(tokenizer, kind, committed) == {demanded[0]}
            step = source.randint(1, 4)
            for _ in range(step):
                allowed = dense(tokenizer, kind, committed)
                assert allowed
                committed.append(source.choice(sorted(allowed)))
                state.commit(committed[-1:])
                if committed[-1] == 0:
                    break
            if 0 in committed or len(committed) > 40:
                break


def check_fitted(tree: TokenTree, fitted: TokenTree, tokenizer: LLTokenizer, kind: str, committed: list[int]) -> None:
    """Kept is what is allowed, with its probes, and nothing else; added is what is certain to spell what is demanded."""

    def paths(of: TokenTree, *, added: bool) -> set[tuple[int, ...]]:
        return {
            tuple(of.tokens[step] for step in path_to(of, node))
            for node in range(len(of))
            if node not in of.probes and (of.sources[node] == GRAMMAR) == added
        }

    right = {path for path in paths(tree, added=False) if 0 not in path and dense(tokenizer, kind, [*committed, *path])}
    kept, new = paths(fitted, added=False), paths(fitted, added=True)
    assert kept | (new & right) == right
    for path in new:
        assert dense(tokenizer, kind, [*committed, *path]) is not None
    probes, kept_probes = ({tuple(of.tokens[at] for at in path_to(of, node)) for node in of.probes} for of in (tree, fitted))
    assert kept_probes == {path for path in probes if path[:-1] in right | {()}}


def test_what_is_demanded_is_drafted_below_every_node() -> None:
    tokenizer, eos = letters(*"abcdefgh")
    state = grammar_state(tokenizer, eos, "regex", "a(bcd|efg)h")
    tree = TokenTree(tokens=(0, 1, 3), parents=(-1, 0, -1), sources=("x",) * 3, scores=(0.5, 0.25, 0.4))
    fitted = within_grammar(tree, state, 8)
    assert fitted.tokens == (0, 1, 2, 3, 7)
    assert fitted.parents == (-1, 0, 1, 2, 3)
    # The first token is demanded as well, and claims more than the draft did.
    assert fitted.sources == (GRAMMAR, "x", GRAMMAR, GRAMMAR, GRAMMAR)
    assert fitted.scores == (1.0, 0.25, 0.25, 0.25, 0.25)
    assert within_grammar(tree, state, 2).tokens == (0, 1, 2, 3)
    assert within_grammar(TokenTree(), state, 8).tokens == (0,)


def test_the_end_comes_where_an_answer_is_complete_and_nowhere_else() -> None:
    tokenizer, eos = letters("a", "b", "c")
    state = grammar_state(tokenizer, eos, "regex", "ab?c?")
    (end,) = eos
    assert ids(state.allowed(())) == {0}
    assert ids(state.allowed((0,))) == {1, 2, end}
    assert ids(state.allowed((0, 1, 2))) == {end}
    # After the end nothing is chosen, and nothing after what is forbidden.
    assert state.allowed((0, end)) is None
    assert state.allowed((1,)) is None
    assert within_grammar(TokenTree(tokens=(0, end), parents=(-1, 0), sources=("x", "x")), state, 4).tokens == (0,)
    state.commit((0, end))
    assert ids(state.allowed(())) == {1, 2, end}


def test_its_time_is_counted_once(tokenizer: LLTokenizer) -> None:
    state = state_of(tokenizer, "json")
    assert state.take_seconds() == 0
    state.allowed(())
    assert state.take_seconds() > 0
    state.allowed(())
    assert state.take_seconds() == 0, "the mask is known"


def test_what_the_grammar_forbids_cannot_be_committed() -> None:
    tokenizer, eos = letters("a", "b")
    state = grammar_state(tokenizer, eos, "regex", "ab")
    with pytest.raises(Internal, match="token 1, number 1 of the answer"):
        state.commit((1,))


def test_of_a_long_demand_no_more_is_drafted_than_may_be() -> None:
    tokenizer, eos = letters("a", "b")
    state = grammar_state(tokenizer, eos, "regex", "ba{5000}")
    tree = TokenTree(tokens=(1, 0, 1), parents=(-1, 0, 1), sources=("x",) * 3)
    fitted = within_grammar(tree, state, 8)
    assert fitted.tokens[:2] == (1, 0)
    assert set(fitted.tokens[2:]) <= {0}
    assert len(fitted) <= 2 + 8
    assert ids(state.allowed((1, 0))) == {0}


def test_an_engine_that_gives_up_ends_no_answer() -> None:
    """At its limits it allows the end of text alone, wherever it stands."""
    tokenizer, eos = letters("a", "b")
    state = grammar_state(tokenizer, eos, "grammar", "start: x\nx: x x | /a/ | /b/", step_max_items=60)

    def go_on() -> None:
        for _ in range(100):
            assert ids(state.allowed(())) >= {0, 1}
            state.commit((0,))

    with refuses(
        InvalidArgument, field="structured_outputs.grammar", value="start: x x: x x | /a/ | /b/", allowed="Too many items"
    ):
        go_on()


def test_an_engine_that_gives_up_after_other_questions_starts_again() -> None:
    tokenizer, eos = letters("a", "b", "a" * 30)
    state = grammar_state(tokenizer, eos, "regex", "(a{1000}){1000}", initial_lexer_fuel=100_000)
    # Demanded text is spelt in the tokenizer's usual way.
    assert ids(state.allowed(())) == {2}
    # The answer to this question has used up what the lexer may be made of: no token can be consumed any more.
    unasked = grammar_state(tokenizer, eos, "regex", "(a{1000}){1000}", initial_lexer_fuel=100_000)
    assert ids(state.allowed((2,))) == ids(unasked.allowed((2,))) == {2}


def test_a_grammar_that_leads_nowhere_fails_loudly() -> None:
    tokenizer, eos = letters("a", "b")
    state = grammar_state(tokenizer, eos, "regex", "ax")
    # A draft that leads there is never taken, unless the answer itself goes there.
    assert state.allowed((0,)) is None
    state.commit((0,))
    with refuses(InvalidArgument, field="structured_outputs.regex", allowed="allows no token after 1 tokens"):
        state.allowed(())


async def test_a_model_with_more_logits_than_tokens(tiny_model: Path) -> None:
    wide = CompiledGrammars(str(tiny_model), 1003, frozenset({0, 1}))
    state = await wide.open(asked("regex", "[^b]*"))
    assert state is not None
    allowed = ids(state.allowed(()))
    assert {0, 1} < allowed
    assert max(allowed) < VOCAB
    assert state.allowed((1002,)) is None
    assert ids(state.allowed(())) == allowed
    wide.stop()


def asked(kind: GrammarKind, text: str, **params: int | bool) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(kind=kind, text=text), **params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        (asked("json", '{"type": "hiccup"}'), "structured_outputs.json", "Invalid type: hiccup"),
        (asked("grammar", "start: <|nowhere|>"), "structured_outputs.grammar", "nowhere"),
        (asked("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "structured_outputs.grammar", "not"),
        (asked("regex", r"[^\s\S]"), "structured_outputs.regex", "allows no token after 0"),
        (asked("regex", "a", min_tokens=3), "min_tokens", "0 with"),
        (asked("regex", "a", ignore_eos=True), "ignore_eos", "false with"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    compiled: CompiledGrammars, params: SamplingParams, field: str, words: str
) -> None:
    with refuses(InvalidArgument, field, allowed=words):
        await compiled.open(params)


async def test_a_grammar_is_compiled_once_and_its_requests_share_nothing(compiled: CompiledGrammars) -> None:
    params = asked("json", json.dumps({"enum": ["ab", "cd"]}))
    first, second = await compiled.open(params), await compiled.open(params)
    assert first is not None
    assert second is not None
    before = ids(second.allowed(()))
    first.commit(sorted(ids(first.allowed(())))[:1])
    assert ids(second.allowed(())) == before != ids(first.allowed(()))
    assert len(compiled._compiled) == 1


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives up soon."""
    few = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(compiled_grammars, "limits", lambda: few)


COSTLY = "((a|b|c)*a(a|b|c){40}x|.*b.{40}y)*"


async def used_up(compiled: CompiledGrammars, vocabulary: dict[str, int], seed: int) -> list[int]:
    """The answer of a request that goes on until the engine gives up, which is the end of this request."""
    state, source, tokens = await compiled.open(asked("regex", COSTLY)), random.Random(seed), list[int]()
    assert state is not None
    with refuses(InvalidArgument, "structured_outputs.regex", allowed="too many states"):
        while len(tokens) < 10_000:
            state.allowed(())
            tokens.append(vocabulary[source.choice("abc")])
            state.commit(tokens[-1:])
    return tokens


@pytest.mark.usefixtures("few_states")
async def test_a_limit_that_one_request_reaches_ends_that_request_alone(
    compiled: CompiledGrammars, tiny_model: Path
) -> None:
    vocabulary = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab()
    beside, begun = await compiled.open(asked("regex", COSTLY)), [vocabulary[letter] for letter in "abcab"]
    assert beside is not None
    beside.commit(begun)
    first = await used_up(compiled, vocabulary, 1)
    # Who has begun goes on, and who comes later has as much as the first had.
    assert vocabulary["a"] in ids(beside.allowed(()))
    assert ids(beside.allowed([vocabulary["b"]])) == dense_of(compiled, [*begun, vocabulary["b"]])
    beside.commit([vocabulary["b"]])
    assert len(await used_up(compiled, vocabulary, 2)) > len(first) / 2


@pytest.mark.usefixtures("few_states")
async def test_at_its_limits_the_engine_is_not_believed(compiled: CompiledGrammars, tiny_model: Path) -> None:
    vocabulary = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab()
    beside = await compiled.open(asked("regex", COSTLY))
    assert beside is not None
    assert vocabulary["a"] in ids(beside.allowed(()))
    await used_up(compiled, vocabulary, 1)
    # It would say that this token is forbidden, and so leave its row free of the grammar.
    path = [vocabulary[letter] for letter in "cbacbbac"]
    assert ids(beside.allowed(path)) == dense_of(compiled, path)
    assert beside.enter(path[0])
    assert not beside.enter(0)
    beside.leave()
    assert not beside.enter(vocabulary["Ċ"])


def dense_of(compiled: CompiledGrammars, tokens: list[int]) -> set[int]:
    matcher = LLMatcher(compiled._tokenizer, engine_text(asked("regex", COSTLY).structured_outputs), log_level=0)  # type: ignore[arg-type]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    return ids(matcher.compute_bitmask())


async def test_a_tokenizer_that_could_not_be_read_is_read_later(
    compiled: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError("Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("transformers.AutoTokenizer.from_pretrained", none_left)
        with refuses(InvalidArgument, "structured_outputs.regex", allowed="Too many open files"):
            await compiled.open(asked("regex", "a"))
    monkeypatch.setattr(compiled_grammars, "time", SimpleNamespace(monotonic=lambda: float("inf")))
    assert await compiled.open(asked("regex", "a"))


@pytest.mark.parametrize("large", [True, False])
async def test_a_large_vocabulary_is_ready_before_anybody_asks(
    compiled: CompiledGrammars, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(compiled_grammars, "_LARGE", VOCAB if large else VOCAB + 1)
    await compiled.prepare()
    assert (compiled._tokenizer is not None) == large
    assert await compiled.open(asked("regex", "a"))


async def test_a_model_without_an_end_is_not_asked_to_end(tiny_model: Path) -> None:
    endless = CompiledGrammars(str(tiny_model), VOCAB, frozenset())
    with refuses(
        InvalidArgument,
        field="structured_outputs.regex",
        value="set",
        allowed="unset: this model has no token that ends an answer",
    ):
        await endless.open(asked("regex", "a"))
    endless.stop()


async def test_a_tokenizer_that_the_engine_cannot_use(tmp_path: Path) -> None:
    unknown = CompiledGrammars(str(tmp_path), VOCAB, frozenset({0}))
    for _ in range(2):
        with refuses(
            InvalidArgument, field="structured_outputs.regex", value="set", allowed="cannot use this model's tokenizer"
        ):
            await unknown.open(asked("regex", "a"))
    unknown.stop()
