"""Passes with states as they are captured on a GPU, launched here one by one: the bits of passes that are launched.

Requests take turns, so that what one's nodes were given is overwritten by another's pass, and captured and launched passes
follow each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.config import TargetConfig
from services.verifier.kernels.triton.row_steps import TritonSteps
from services.verifier.loading.memory import noted_bytes
from services.verifier.loading.model_size import shape_of
from services.verifier.model.graphs import Graphs
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.recurrence.captured_steps import CapturedSteps, SteppedPass
from services.verifier.recurrence.order import Line
from services.verifier.recurrence.room import room_for_accepted
from services.verifier.recurrence.state_pool import StatePool
from tests.kernels.triton_interpreter import hopper
from tests.lossless.hybrids import make_hybrid

pytestmark = pytest.mark.exhaustive

LENGTH = 40
MEANS = TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), steps=lambda _: (TritonSteps(), ""))


def made_of(kind: str, folder: Path) -> TransformersTarget:
    """States and attention as on a GPU, linear layers as on a CPU."""
    given = {"kv_cache_tokens": 768, "max_model_len": 192, "threads": 1, "pass_requests": 4, "mamba_block_size": 64}
    config = TargetConfig(model_path=str(make_hybrid(kind, folder / kind)), **given)  # type: ignore[arg-type]
    return TransformersTarget(config, means=MEANS)


# Without attention or sums over keys, for which the interpreter takes minutes.
@pytest.fixture(scope="module", params=["rwkv"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersTarget]:
    with hopper():
        yield made_of(request.param, tmp_path_factory.mktemp("captured"))


@pytest.fixture(scope="module")
def graphs(target: TransformersTarget) -> Graphs:
    return target._part._captured(target._config)


@pytest.fixture
def opened(target: TransformersTarget, graphs: Graphs) -> Iterator[TransformersTarget]:
    """Its passes are captured; nothing is open before a test, nor after it."""
    target._part._graphs = graphs
    yield target
    target._part._graphs = None
    for name in [*target.blocks._owners]:
        target.close(name)
    target.blocks.forget_all()


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each captured pass, the number of its requests."""
    found: list[int] = []
    fill = SteppedPass.fill

    def noted(self: SteppedPass, batch: list[Rows]) -> None:
        found.append(len(batch))
        fill(self, batch)

    monkeypatch.setattr(SteppedPass, "fill", noted)
    return found


def text_of(target: TransformersTarget, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1, target.vocab_size) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def alone(target: TransformersTarget) -> dict[str, torch.Tensor]:
    """Logits of two texts in one launched pass each, which has the bits of plain decoding (``test_triton_states``)."""
    found = {}
    for name in "ab":
        assert target.open(name, LENGTH)
        rows = Rows(request_id=name, context=0, tokens=tuple(text_of(target, ord(name))), logits=LENGTH)
        found[name] = target.forward([rows])[0]
        target.close(name)
    return found


def tree(name: str, text: list[int], at: int, source: random.Random) -> tuple[Rows, list[int]]:
    """The token at ``at`` and a tree of its successors among wrong siblings; the rows of the right ones."""
    tokens: list[int] = []
    parents: list[int] = []
    path = [-1]
    for right in text[at + 1 : at + 1 + source.randint(0, 3)]:
        for _ in range(source.randint(0, 2)):
            parents.append(source.randint(-1, len(tokens) - 1))
            tokens.append(source.randrange(50))
        parents.append(path[-1])
        path.append(len(tokens))
        tokens.append(right)
    rows = Rows(request_id=name, context=at, tokens=(text[at], *tokens), parents=tuple(parents), logits=1 + len(tokens))
    return rows, [1 + node for node in path]


def same_in_turns(
    target: TransformersTarget, graphs: Graphs, alone: dict[str, torch.Tensor], seed: int, captured: float = 0.8
) -> bool:
    """Whether two requests' rows have the right bits; a pass holds one or both, and is captured, or it is launched."""
    source, same = random.Random(seed), True
    texts, at = {name: text_of(target, ord(name)) for name in "ab"}, {"a": 0, "b": 0}
    for name in "ab":
        target.open(name, LENGTH + 16)
    while min(at.values()) < LENGTH - 4:
        some = source.choice(["a", "b", "ab", "ba"])
        packed = {name: tree(name, texts[name], at[name], source) for name in some if at[name] < LENGTH - 4}
        if not packed:
            continue
        target._part._graphs = graphs if source.random() < captured else None
        made = target.forward([rows for rows, _ in packed.values()])
        for (name, (_, path)), rows in zip(packed.items(), made, strict=True):
            same &= torch.equal(rows[path], alone[name][at[name] : at[name] + len(path)])
            kept = path[: source.randint(1, len(path))]
            target.keep(name, at[name], kept)
            at[name] += len(kept)
    for name in "ab":
        target.close(name)
    return same


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_take_turns(
    opened: TransformersTarget, graphs: Graphs, alone: dict[str, torch.Tensor], filled: list[int], seed: int
) -> None:
    assert same_in_turns(opened, graphs, alone, seed)
    assert {1, 2} <= set(filled)


def test_notes_take_what_is_planned(opened: TransformersTarget, filled: list[int]) -> None:
    assert opened.open("a", 20)
    opened.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1)])
    states, config = opened._part.states, opened._config
    assert filled == [1] and states is not None
    assert sum(given.nbytes for given in states._noted.given) == noted_bytes(config, shape_of(config)) > 0


def _not_rescued(self: StatePool, batch: list[Rows]) -> tuple[list[Line], list[int]]:
    """A fault: what nodes of requests that are not in the pass were given is overwritten."""
    lines, early, _ = self._enter(batch, self._noted)
    return lines, [node for _, nodes in early for node in nodes]


def _always_fits(self: CapturedSteps, batch: list[Rows]) -> bool:
    """A fault: accepted rows are looked for where captured passes note theirs, wherever they are."""
    return True


@pytest.mark.parametrize(
    ("owner", "name", "fault"), [(StatePool, "begin_captured", _not_rescued), (CapturedSteps, "fits", _always_fits)]
)
def test_planted_faults_are_seen(
    opened: TransformersTarget, graphs: Graphs, alone: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch,
    owner: type, name: str, fault: object,
) -> None:  # fmt: skip
    monkeypatch.setattr(owner, name, fault)
    assert not all(same_in_turns(opened, graphs, alone, seed, captured=0.6) for seed in range(3))


def test_what_does_not_fit_is_launched(opened: TransformersTarget, filled: list[int]) -> None:
    """More accepted rows than there is room for behind a small pass; then passes are captured again."""
    deep = room_for_accepted(1) + 1
    text = [1 + at % 40 for at in range(deep + 4)]
    opened.open("deep", len(text) + 8)
    rows = Rows(
        request_id="deep", context=0, tokens=tuple(text[: deep + 1]), parents=tuple(range(-1, deep - 1)), logits=deep + 1
    )
    opened.forward([rows])
    opened.keep("deep", 0, range(deep + 1))
    filled.clear()
    for at in range(deep + 1, deep + 4):
        opened.forward([Rows(request_id="deep", context=at, tokens=(text[at],), logits=1)])
        assert len(filled) == at - deep - 1


def test_a_state_is_kept_in_a_captured_pass(opened: TransformersTarget, filled: list[int]) -> None:
    tokens = tuple(at * 7 % (opened.vocab_size - 1) + 1 for at in range(70))
    prefix = Prefix(tokens=tokens, tenant="a")
    whole = {}
    for name, begin in (("first", 0), ("second", 64)):
        assert opened.open(name, 90, prefix) and opened.computed(name) == begin
        rows = Rows(request_id=name, context=begin, tokens=tokens[begin:], logits=70 - begin)
        whole[name] = opened.forward([rows])[0]
        opened.keep(name, begin, range(70 - begin))
        opened.close(name)
    assert filled == [1, 1]
    assert torch.equal(whole["second"], whole["first"][64:])
