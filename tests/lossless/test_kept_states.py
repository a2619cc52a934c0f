"""Prefixes of models whose layers have states: what begins at a kept state has the bits of what is computed whole.

States of other borders and other texts are planted, and must be seen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.kv_cache.kept_states import KeptStates
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.recurrence.state_pool import StatePool
from services.verifier.service import VerifierService
from speculation.sources import STRATEGIES
from speculation.types import Plan
from tests.engine.fakes import PLAIN, collect, origin, request
from tests.engine.stage_forks import launch_fork
from tests.lossless.hybrids import KINDS, chain, close_all, make_hybrid, random_text

pytestmark = pytest.mark.xdist_group("hybrids")

LENGTH = 200
BLEND = Plan(strategy="blend", sources=STRATEGIES["blend"], max_nodes=12, observe_top_k=6)


def config_of(folder: Path, **settings: object) -> TargetConfig:
    given = {"kv_cache_tokens": 2048, "max_model_len": 512, "threads": 1, "mamba_block_size": 64, **settings}
    return TargetConfig(model_path=str(folder), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(request.param, tmp_path_factory.mktemp("kept") / request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    return TransformersTarget(config_of(folder))


@pytest.fixture
def opened(target: TransformersTarget) -> Iterator[TransformersTarget]:
    """Nothing is open before a test, nor after it, and nothing is shared with other tests."""
    yield target
    close_all(target)
    target.blocks.forget_all()


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    return random_text(target, LENGTH)


@pytest.fixture(scope="module")
def whole(target: TransformersTarget, text: list[int]) -> torch.Tensor:
    """Logits of the text as one that shares nothing: [LENGTH, vocabulary]."""
    assert target.open("whole", LENGTH)
    made = target.forward([chain("whole", 0, text)])[0]
    target.close("whole")
    return made


def shared(target: TransformersTarget, name: str, text: list[int]) -> int:
    """Open a request that begins with ``text``. Returns how many of its tokens are there already."""
    assert target.open(name, LENGTH + 16, Prefix(tokens=text, tenant="t"))
    return target.computed(name)


def computed(target: TransformersTarget, name: str, text: list[int], size: int) -> torch.Tensor:
    """Logits of what is missing of a request's text, in chunks."""
    made = []
    for at in range(target.computed(name), len(text), size):
        part = text[at : at + size]
        made.append(target.forward([chain(name, at, part)])[0])
        target.keep(name, at, range(len(part)))
    return torch.cat(made)


def begins_rightly(target: TransformersTarget, text: list[int], whole: torch.Tensor, size: int = LENGTH) -> bool:
    """Whether requests that begin with parts of a text, once this is computed, begin at borders, with its bits."""
    shared(target, "first", text)
    same = torch.equal(computed(target, "first", text, size), whole)
    for name, length in (("two", 140), ("all", LENGTH), ("one", 100)):
        begun = shared(target, name, text[:length])
        assert begun == (length - 1) // 64 * 64
        same &= torch.equal(computed(target, name, text[:length], 50), whole[begun:length])
    return same


@pytest.mark.parametrize("size", [LENGTH, 50, 64, 7])
def test_a_prompt_begins_at_the_last_border(
    opened: TransformersTarget, text: list[int], whole: torch.Tensor, size: int
) -> None:
    assert begins_rightly(opened, text, whole, size)


def test_borders_of_several_requests_in_one_pass(opened: TransformersTarget, text: list[int], whole: torch.Tensor) -> None:
    for name, tokens in (("a", text), ("b", text[1:]), ("c", text[:30])):
        assert shared(opened, name, tokens) == 0
    opened.forward([chain("a", 0, text[:60])])
    opened.keep("a", 0, range(60))
    own, _, short = opened.forward([chain("a", 60, text[60:]), chain("b", 0, text[1:]), chain("c", 0, text[:30])])
    assert torch.equal(own, whole[60:])
    assert torch.equal(short, whole[:30])
    for name, tokens in (("a", text[60:]), ("b", text[1:]), ("c", text[:30])):
        opened.keep(name, 60 if name == "a" else 0, range(len(tokens)))
    assert shared(opened, "d", text) == 192
    assert torch.equal(computed(opened, "d", text, 3), whole[192:])
    assert shared(opened, "e", text[1:]) == 192
    # What precedes a token says what the state is: that of the same tokens from another beginning is not taken.
    opened.forward([chain("e", 192, text[193:])])
    assert not torch.equal(opened.forward([chain("e", 199, text[199:])])[0], whole[199:])


def _in_trees(target: TransformersTarget, text: list[int], at: int) -> None:
    """Go on with ``tree`` from ``at`` to the end of the text, by trees of which paths are kept."""
    while at < len(text) - 4:
        right = text[at + 1 : at + 4]
        rows = Rows(
            request_id="tree", context=at, tokens=(text[at], 1, *right, 2), parents=(-1, -1, 1, 2, 1), logits=6
        )  # fmt: skip
        target.forward([rows])
        target.keep("tree", at, [0, 2, 3, 4])
        at += 4


@pytest.mark.parametrize("start", [50, 51, 52, 53])
def test_states_are_kept_among_the_nodes_of_trees(
    opened: TransformersTarget, text: list[int], whole: torch.Tensor, start: int
) -> None:
    shared(opened, "tree", text[:start])
    computed(opened, "tree", text[:start], LENGTH)
    _in_trees(opened, text, start)
    begun = shared(opened, "again", text)
    assert begun == 192
    assert torch.equal(computed(opened, "again", text, LENGTH), whole[begun:])


def test_few_kept_states_give_way_and_change_no_bit(folder: Path, text: list[int], whole: torch.Tensor) -> None:
    target = TransformersTarget(config_of(folder, kv_cache_tokens=512, mamba_block_size=128))
    source, begins = random.Random(5), set[int]()
    for number in range(24):
        # Four texts of one beginning; the cache keeps four states.
        length = source.choice([100, 135, 150, 199])
        tokens = [*text[:length], *[source.randrange(1, 5)] * 5] if source.random() < 0.7 else text[number:length]
        begun = shared(target, "a", tokens)
        begins.add(begun)
        found = computed(target, "a", tokens, source.choice([20, 300]))
        if tokens[:length] == text[:length]:
            assert torch.equal(found[: length - begun], whole[begun:length])
        target.close("a")
    assert begins == {0, 128}
    assert sorted(target.blocks._states._free) != []  # type: ignore[union-attr]


def _of_another_border(states: KeptStates, block: int) -> int | None:
    slot = _slot_of(states, block)
    return None if slot is None else next((other for other in states._slots.values() if other != slot), slot)


def _one_row_late(pool: StatePool, owner: str, length: int, kept: int) -> None:
    held = pool._held[owner]
    _save(pool, owner, length, kept)
    held.saved[-1] = (max(length - 1, held.length + 1), held.saved[-1][1])


_slot_of, _save = KeptStates.slot_of, StatePool.save


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [(KeptStates, "slot_of", _of_another_border), (StatePool, "save", _one_row_late)],
    ids=["the state of another border", "a state one token short"],
)
def test_wrong_states_are_seen_here(
    opened: TransformersTarget, text: list[int], whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch,
    where: type, name: str, fault: object,
) -> None:  # fmt: skip
    monkeypatch.setattr(where, name, fault)
    assert not begins_rightly(opened, text, whole)


def test_without_the_cache_nothing_is_shared(folder: Path, text: list[int]) -> None:
    target = TransformersTarget(config_of(folder, enable_prefix_caching=False))
    shared(target, "a", text)
    computed(target, "a", text, LENGTH)
    assert shared(target, "b", text) == 0


# Their answers cross the third border.
PROMPTS = [[5, 6, 7, 8, 9] * 34, [5, 6, 7, 8, 9] * 13 + [40, 41] * 50]
SAMPLING: dict[str, object] = {"temperature": 0.8, "top_p": 0.95, "seed": 2}


async def said(folder: Path, plan: Plan, *, together: bool, **settings: object) -> tuple[list[list[int]], int, int]:
    """The answers to the prompts, each asked twice, with the tokens that the cache had and the number of preemptions."""
    link = InProcessDraftLink(DrafterService(DrafterConfig()))
    loop = LoopConfig(max_batched_tokens=100, max_num_seqs=16, headroom=0)
    target = config_of(folder, **settings)
    running = VerifierService(VerifierConfig(model_name="hybrid", target=target, loop=loop, budget="fixed"), [origin(link)])
    await running.start()
    try:
        asked = [
            request(f"r{number}", prompt, plan, max_tokens=40, ignore_eos=True, **SAMPLING)
            for number, prompt in enumerate(PROMPTS * 2)
        ]
        if together:
            results = await asyncio.gather(*(collect(running.loop, one) for one in asked))
        else:
            results = [await collect(running.loop, one) for one in asked]
        stats = running.loop.stats
        return [tokens for tokens, _, _ in results], stats.prompt_tokens_cached, stats.preemptions
    finally:
        await running.stop()


async def test_the_cache_changes_no_token(folder: Path) -> None:
    wanted, without, _ = await said(folder, PLAIN, together=False, enable_prefix_caching=False)
    assert without == 0
    answers, cached, _ = await said(folder, BLEND, together=False)
    assert answers == wanted
    # The second prompt begins as the first one does; then both are asked again.
    assert cached == 64 + 128 + 128
    # Those that begin together share nothing at first; those that give way begin again at what is kept.
    answers, cached, preemptions = await said(folder, BLEND, together=True, kv_cache_tokens=448, max_model_len=256)
    assert answers == wanted
    assert cached and preemptions


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["lfm2", "bamba", "mamba"])
def test_over_two_stages(model_type: str, tmp_path: Path) -> None:
    folder = make_hybrid(model_type, tmp_path / "model")
    text = [each % 50 + 1 for each in range(LENGTH)]
    alone = TransformersTarget(config_of(folder))
    alone.open("whole", LENGTH)
    target = TransformersTarget(config_of(folder, stages=2), launch_fork)
    try:
        assert begins_rightly(target, text, alone.forward([chain("whole", 0, text)])[0])
    finally:
        target.shutdown()
