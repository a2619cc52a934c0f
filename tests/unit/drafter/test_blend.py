"""The blend: the most probable tree of its size, probabilities learnt from what came, drafts for what may come."""

from __future__ import annotations

import errno
import json
import math
import random
from itertools import product
from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator, Candidate
from services.drafter.service import DrafterService
from services.drafter.sessions.outcomes import likeliest_outcomes
from services.drafter.sessions.tree_walk import ProposedTreeWalk, prior_of
from speculation.messages import Draft, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import chain, path_to, validate
from speculation.types import TokenTree


class Table:
    """A source that knows what follows a token; a place is the last token."""

    def __init__(self, last: int, after: dict[int, list[tuple[int, str]]]) -> None:
        self.last, self.after = last, after

    def start(self) -> int:
        return self.last

    def follow(self, place: int, token: int) -> int | None:
        return token if token in self.after else None

    def candidates(self, place: int) -> list[tuple[int, str]]:
        return self.after.get(place, [])

    def observe(self, report: StepReport) -> None:
        self.last = report.committed[-1]

    def catch_up(self) -> bool:
        return False

    def close(self) -> None:
        pass


def report(*committed: int) -> StepReport:
    return StepReport(session_id="s", committed=committed, length=0, prefix_hash=0, accepted_path=(), max_nodes=8)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    validate(tree, vocab_size=1000, max_nodes=512)
    return {tuple(tree.tokens[i] for i in path_to(tree, node)): tree.scores[node] for node in range(len(tree))}


def test_a_draft_is_the_most_probable_tree_of_its_size() -> None:
    numbers = random.Random(1)
    kinds = {f"k:{i}": numbers.uniform(0.05, 0.7) for i in range(6)}
    after = {t: [(f, numbers.choice(list(kinds))) for f in numbers.sample(range(5), 3)] for t in range(5)}
    calibrator = Calibrator(kinds)
    tree = paths(BlendSession({"x": Table(0, after)}, calibrator).draft(12))
    # Every path of up to four tokens, by brute force.
    every: dict[tuple[int, ...], float] = {}
    for length in range(1, 5):
        for path in product(range(5), repeat=length):
            probability, last = 1.0, 0
            for token in path:
                options: list[Candidate] = [(f, (kind,)) for f, kind in after[last]]
                chances = dict(zip([f for f, _ in options], calibrator.probabilities(options), strict=True))
                probability *= chances.get(token, 0.0)
                last = token
            every[path] = probability
    best = sorted(every.values(), reverse=True)[:12]
    assert sorted(tree.values(), reverse=True) == pytest.approx(best)
    for path, score in tree.items():
        assert every[path] == pytest.approx(score)


def test_one_source_goes_on_where_another_began() -> None:
    first, second = Table(0, {0: [(1, "a:0")]}), Table(0, {0: [], 1: [(2, "b:0")]})
    tree = BlendSession({"first": first, "second": second}, Calibrator({"a:0": 0.5, "b:0": 0.5})).draft(4)
    assert set(paths(tree)) == {(1,), (1, 2)}
    assert tree.sources == ("first", "second")


def test_agreement_counts() -> None:
    calibrator = Calibrator({"a:0": 0.4, "b:0": 0.4})
    together, alone = calibrator.probabilities([(1, ("a:0", "b:0")), (2, ("a:0",))])
    assert together > alone


def test_a_source_is_worth_what_it_knows_beyond_those_before_it() -> None:
    """Inside phrases both sources are right. What the second one says where the first is silent is mostly wrong."""
    calibrator = Calibrator({"counted:0": 0.6, "latest:0": 0.6})
    for _ in range(60):
        for _ in range(5):
            calibrator.learn([(9, ("counted:0", "latest:0"))], 9)
        calibrator.learn([(1, ("latest:0",))], 2)
    assert calibrator.probabilities([(9, ("counted:0", "latest:0"))])[0] > 0.95
    assert calibrator.probabilities([(1, ("latest:0",))])[0] < 0.09


def test_what_a_model_says_counts_beside_the_text() -> None:
    kinds = {"a:0": 0.4, "m:1:0": 0.9, "m:1:9": 0.05}
    calibrator = Calibrator(kinds, models=["m"])
    sure, unsure = (calibrator.probabilities([(1, ("a:0", kind))])[0] for kind in ("m:1:0", "m:1:9"))
    assert sure > 0.8 > 0.4 > unsure


def test_probabilities_become_what_happens() -> None:
    calibrator = Calibrator({"good:0": 0.1, "bad:0": 0.9})
    numbers = random.Random(2)
    for _ in range(4000):
        draw = numbers.random()
        came = 1 if draw < 0.7 else 2 if draw < 0.8 else 3
        calibrator.learn([(1, ("good:0",)), (2, ("bad:0",))], came)
    good, bad = calibrator.probabilities([(1, ("good:0",)), (2, ("bad:0",))])
    assert good == pytest.approx(0.7, abs=0.1)
    assert bad == pytest.approx(0.1, abs=0.07)
    assert good + bad < 1


def test_a_session_learns_from_every_node_on_the_way_checked_or_not() -> None:
    after = {0: [(1, "a:0")], 1: [(2, "a:0")], 2: [(3, "b:0")]}
    calibrator = Calibrator({"a:0": 0.5, "b:0": 0.5})
    session = BlendSession({"x": Table(0, after)}, calibrator)
    session.draft(8)
    session.observe(report(1, 2, 9))
    # a was right twice, b was wrong once.
    assert calibrator.probabilities([(1, ("a:0",))])[0] > 0.5 > calibrator.probabilities([(1, ("b:0",))])[0]


def test_what_is_learnt_survives_and_holds_no_text(tmp_path: Path) -> None:
    calibrator = Calibrator({"a:0": 0.5})
    for _ in range(50):
        calibrator.learn([(123456, ("a:0",))], 123456)
    calibrator.save(tmp_path / "c.json")
    assert "123456" not in (tmp_path / "c.json").read_text()
    later = Calibrator({"a:0": 0.5})
    assert later.load(tmp_path / "c.json")
    assert later.probabilities([(1, ("a:0",))]) == pytest.approx(calibrator.probabilities([(1, ("a:0",))]), abs=1e-3)


def test_what_could_not_be_read_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.json"
    learnt = Calibrator({"a:0": 0.5})
    learnt.learn([(1, ("a:0",))], 1)
    learnt.save(file)
    before = file.read_bytes()

    def none_left(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", none_left)
        other = Calibrator({"b:0": 0.5})
        assert not other.load(file)
        other.learn([(1, ("b:0",))], 1)
        other.save(file)
    assert file.read_bytes() == before


def test_two_drafters_that_share_a_file_keep_what_each_has_learnt(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    first, second = (Calibrator({"a:0": 0.5, "b:0": 0.5}) for _ in range(2))
    for _ in range(50):
        first.learn([(1, ("a:0",))], 1)
        second.learn([(1, ("b:0",))], 1)
    second.learn([(1, ("a:0",))], 2)
    first.save(file)
    second.save(file)
    later = Calibrator({"a:0": 0.5, "b:0": 0.5})
    later.load(file)
    chances = later.probabilities([(1, ("a:0",))]), later.probabilities([(1, ("b:0",))])
    assert chances == (
        pytest.approx(first.probabilities([(1, ("a:0",))]), abs=1e-3),
        pytest.approx(second.probabilities([(1, ("b:0",))]), abs=1e-3),
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2}',
        '{"version": 0, "weights": {}}',
        '{"version": 2, "weights": {"a:0": [1e9, 2]}}',
        '{"version": 2, "weights": {"a:0": ["x", 2]}}',
        '{"version": 2, "weights": {"a:0": [NaN, 2]}}',
        '{"version": 2, "weights": {"a:0": [1, -1]}}',
    ],
)
def test_a_foreign_file_of_weights_is_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    calibrator = Calibrator({"a:0": 0.5})
    assert not calibrator.load(file)
    assert calibrator.probabilities([(1, ("a:0",))]) == pytest.approx([0.5])
    assert file.read_text() == content
    assert not calibrator.load(tmp_path / "missing")


class Chains:
    """A source of trees."""

    def draft(self, max_nodes: int) -> TokenTree:
        return chain([4, 5, 6][:max_nodes], "chains")

    def observe(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


def test_a_source_of_trees_takes_part() -> None:
    walk = ProposedTreeWalk("chains", Chains(), 3)
    tree = BlendSession({"chains": walk}, Calibrator(prior_of("chains"))).draft(8)
    assert list(paths(tree)) == [(4,), (4, 5), (4, 5, 6)]


class Claiming:
    """A source of trees that is sure of one path and not of another."""

    def draft(self, max_nodes: int) -> TokenTree:
        return TokenTree(tokens=(4, 5, 6), parents=(-1, -1, 1), sources=("c",) * 3, scores=(0.1, 0.8, 0.7))

    def observe(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


def test_what_a_source_claims_counts_not_its_order() -> None:
    walk = ProposedTreeWalk("c", Claiming(), 3)
    place = walk.start()
    assert place is not None
    first, second = (kind for _, kind in walk.candidates(place))
    below = walk.follow(place, 5)
    assert below is not None
    ((token, third),) = walk.candidates(below)
    # After its parent, the third is claimed at 7/8.
    assert token == 6 and (first, second, third) == ("c:1:6", "c:1:0", "c:2:0")
    assert prior_of("c")[second] > 0.7 > 0.12 > prior_of("c")[first]
    tree = BlendSession({"c": ProposedTreeWalk("c", Claiming(), 3)}, Calibrator(prior_of("c"))).draft(2)
    assert list(paths(tree)) == [(5,), (5, 6)]


def test_outcomes_are_paths_and_what_the_target_says_behind_them() -> None:
    tree = TokenTree(tokens=(1, 2, 3), parents=(-1, 0, -1), sources=("x",) * 3, scores=(0.6, 0.5, 0.2))
    likely = {-1: [(1, 0.6), (9, 0.2)], 0: [(2, 0.8), (8, 0.1)], 1: [(7, 0.9)], 2: [(6, 0.5)]}
    assert likeliest_outcomes(tree, lambda node: likely[node], 2) == [(1, 2, 7), (9,)]
    assert len(likeliest_outcomes(tree, lambda node: likely[node], 10)) == 4


async def test_drafts_sent_ahead_are_those_that_would_come_later() -> None:
    service = DrafterService(DrafterConfig(draft_ahead=3))
    text = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)
    names = ("suffix", "recycling")
    opening = OpenSession(session_id="s", tokens=text, prompt_length=len(text), sources=names, max_nodes=3)
    first = await service.open(opening)
    assert isinstance(first, Draft)
    assert first.tree.tokens[0] == 3
    ahead = [draft async for draft in service.further("s")]
    assert 0 < len(ahead) <= 3
    for draft in ahead:
        assert (draft.base_length, draft.base_hash) == (first.base_length, first.base_hash)
        assert draft.assumed
    likeliest = ahead[0]
    # Nothing else is known of this text than what goes on: the same nodes, whether drafted before or after.
    prefix = extend_hash(extend_hash(EMPTY_HASH, text), likeliest.assumed)
    then = await service.step(
        StepReport(
            session_id="s",
            committed=likeliest.assumed,
            length=len(text) + len(likeliest.assumed),
            prefix_hash=prefix,
            accepted_path=(),
            max_nodes=3,
        )
    )
    assert isinstance(then, Draft)
    assert then.tree.tokens[0] == likeliest.tree.tokens[0]
    assert [draft async for draft in service.further("unknown")] == []
    unhurried = DrafterService(DrafterConfig())
    await unhurried.open(opening)
    assert [draft async for draft in unhurried.further("s")] == []


async def test_the_service_keeps_what_it_learnt(tmp_path: Path) -> None:
    file = tmp_path / "drafting" / "model"
    service = DrafterService(DrafterConfig(calibration=file))
    text = (1, 2, 1, 2, 1)
    await service.open(OpenSession(session_id="s", tokens=text, prompt_length=5, sources=("suffix",), max_nodes=4))
    step = StepReport(
        session_id="s",
        committed=(2,),
        length=6,
        prefix_hash=extend_hash(extend_hash(EMPTY_HASH, text), (2,)),
        accepted_path=(),
        max_nodes=4,
    )
    await service.step(step)
    await service.stop()
    (saved,) = file.parent.iterdir()
    weights = json.loads(saved.read_text())["weights"]
    assert weights
    assert all(math.isfinite(weight) for weight, _ in weights.values())
