"""``outrider bench sizes``: its arithmetic by hand, targets and drafters of other sizes, what it measures and says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.bench.records import Request
from benchmarks.inflate import Size
from benchmarks.papers.engine import Decoded, PaperEngine, RowDrafting
from benchmarks.sizes.arithmetic import DraftedRow, PassCurve, SizeCosts, best, payoff, smallest, stacked
from benchmarks.sizes.default_model import PlainAnswers, decode_drafted, steady
from benchmarks.sizes.draft_cost import CostText, draft_seconds, joined
from benchmarks.sizes.report import as_object, tables_of
from benchmarks.sizes.run import MeasuredSizes
from benchmarks.sizes.scaled_drafter import scaled_dimensions, spread_layers, write_scaled
from benchmarks.sizes.stack import LAYERS, ROWS, numbers_of, own_shape, read_sizes, target_of, write_stack
from cli.main import app
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.files.kinds import inspect
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain
from speculation.types import SamplingParams, TokenTree
from tests.running.refusals import refuses
from tests.tiny_models.trained_heads import make_blocks, make_head, make_medusa, make_streams


def row(drafter: str, *, beside: bool = False, budget: int = 15, tau: float = 2.0, text_s: float = 0.0) -> DraftedRow:
    return DraftedRow(drafter=drafter, beside=beside, budget=budget, nodes=budget, tau=tau, text_s=text_s)


def costs(size: str, passes: Mapping[int, float], fspad: float, rest_s: float = 0.0) -> SizeCosts:
    drafts = {"fspad": {15: fspad, 31: 2 * fspad}}
    return SizeCosts(size=size, curve=PassCurve(passes), rest_s=rest_s, drafts_s=drafts)


def test_passes_between_and_beyond_what_was_measured() -> None:
    curve = PassCurve({1: 10.0, 8: 17.0, 16: 33.0})
    # Of the line through 8 and 16, whose slope is 2, also beyond it; never less than one row.
    assert [curve.at(rows) for rows in (1, 4.5, 8, 12, 16, 20, 0.5)] == [10.0, 13.5, 17.0, 25.0, 33.0, 41.0, 10.0]
    assert PassCurve({1: 3.0}).at(7) == 3.0


def test_layers_are_added_to_what_one_takes() -> None:
    # 7 layers take 12 and 30 more than one: 2 and 5 a layer. So 30 layers take 29 times that more.
    made = stacked({1: 4.0, 16: 10.0}, {1: 16.0, 16: 40.0}, measured=7, layers=30)
    assert made.seconds == {1: 62.0, 16: 155.0}
    # A layer that seems to take less than nothing takes nothing.
    assert stacked({1: 4.0}, {1: 3.5}, measured=7, layers=30).seconds == {1: 4.0}


def test_a_speed_up_by_hand() -> None:
    one = costs("1", {1: 0.010, 16: 0.025}, fspad=0.004, rest_s=0.002)
    assert one.plain_s == pytest.approx(0.012)
    # 2.5 tokens in 4 + 25 + 2 ms against 12 ms each; with 1 ms for n-grams, in 32 ms.
    assert one.speed_up(row("fspad", tau=2.5)) == pytest.approx(30 / 31)
    assert one.speed_up(row("fspad", tau=2.5, beside=True, text_s=0.001)) == pytest.approx(30 / 32)
    assert one.speed_up(row("", tau=1.8, text_s=0.001)) == pytest.approx(21.6 / 28)
    # With 31 nodes the draft takes 8 ms and the pass 25 + 16 * 1: 3.9 tokens in 51 ms.
    wide = row("fspad", budget=31, tau=3.9)
    assert one.speed_up(wide) == pytest.approx(46.8 / 51)
    assert best(one, [row("fspad", tau=2.5), wide, row("", tau=9.0)], "fspad", beside=False).budget == 15


def test_from_which_size_on_it_pays() -> None:
    rows = [row("", tau=1.5), row("fspad", tau=2.2), row("fspad", tau=2.5, beside=True)]
    # 16 rows cost 1.25 of one. A draft costs 1.5, 0.5 and 0.1 of a step. n-grams: 1.5 / 1.25 = 1.2 everywhere; alone 2.2 /
    # 2.75 = 0.8, 2.2 / 1.75 = 1.26, 2.2 / 1.35 = 1.63; beside 2.5 / 2.75 = 0.91, 2.5 / 1.75 = 1.43, 1.85.
    sizes = [
        costs(size, {1: step, 16: 1.25 * step}, fspad=share * step)
        for size, step, share in (("0.1", 0.01, 1.5), ("1", 0.1, 0.5), ("7", 0.7, 0.1))
    ]
    gains = [round(each.speed_up(rows[1]), 2) for each in sizes]
    assert gains == [0.8, 1.26, 1.63]
    found = payoff("fspad", sizes, rows)
    assert (found.over_plain, found.over_ngrams, found.beside_ngrams) == ("1", "1", "1")
    better = [row("", tau=1.7), *rows[1:]]
    # n-grams 1.36 are above 1.26, and below 1.43.
    found = payoff("fspad", sizes, better)
    assert (found.over_plain, found.over_ngrams, found.beside_ngrams) == ("1", "7", "1")
    hopeless = [row("", tau=4.0), row("fspad", tau=1.0), row("fspad", tau=1.1, beside=True)]
    found = payoff("fspad", sizes, hopeless)
    assert (found.over_plain, found.over_ngrams, found.beside_ngrams) == (None, None, None)


def test_n_grams_that_lose_are_not_what_is_to_be_beaten() -> None:
    sizes = [costs("1", {1: 0.1, 16: 0.2}, fspad=0.01)]
    # n-grams 0.6, the head 0.95: above n-grams, and still slower than plain decoding.
    rows = [row("", tau=1.2), row("fspad", tau=2.0), row("fspad", tau=2.0, beside=True)]
    found = payoff("fspad", sizes, rows)
    assert (found.over_plain, found.over_ngrams, found.beside_ngrams) == (None, None, None)


def test_one_that_pays_by_chance_does_not_count() -> None:
    assert smallest(["1", "3", "7"], [True, False, True]) == "7"
    assert smallest(["1", "3", "7"], [True, True, True]) == "1"
    assert smallest(["1", "3", "7"], [True, True, False]) is None


def test_the_pass_that_waits_for_the_prompts_reading_is_left_out() -> None:
    arrivals = ((1.0, 1), (9.0, 3), (9.5, 2), (10.5, 4), (13.5, 3))
    answer = Decoded(tokens=(1,) * 13, arrivals=arrivals, drafted_by={}, accepted_by={})
    # Steps of 0.5, 1 and 3 s, which bring 2, 4 and 3 tokens; the one of 8 s is none of them.
    assert steady([answer, answer]) == (1.0, 3.0)
    assert steady([]) == (0.0, 0.0)


class DriftingEngine:
    """A machine whose steps take longer with each answer: 1 s, 1.5 s, 2 s, ...; with drafts they bring two tokens."""

    config = DrafterConfig()

    def __init__(self) -> None:
        self.answered: list[bool] = []

    def draft(self, drafting: RowDrafting) -> None:
        pass

    def answer(self, request: Request, params: SamplingParams, *, plainly: bool = False) -> Decoded:
        step_s = 1 + 0.5 * len(self.answered)
        self.answered.append(plainly)
        each = 1 if plainly else 2
        steps = params.max_tokens // each if params.max_tokens else 0
        arrivals = tuple((step_s * number, each) for number in range(steps))
        drafted = {} if plainly else {"suffix": steps - 1}
        return Decoded(tokens=(7,) * (steps * each), arrivals=arrivals, drafted_by=drafted, accepted_by={})


def test_a_machine_that_drifts_favours_neither() -> None:
    """Measured before all drafters, plain decoding would be twice as fast in the first row and as slow in the last."""
    requests = [Request(id=str(number), prompt=(1, 2, 3), seed=0, task="a") for number in range(40)]
    engine = DriftingEngine()
    answers = [Decoded(tokens=(7,) * 40, arrivals=(), drafted_by={}, accepted_by={})] * len(requests)
    plain = PlainAnswers(requests=requests, answers=answers, step_s=1.0)
    found = decode_drafted(cast(PaperEngine, engine), plain, [], (3, 7), 40, lambda _: None)
    assert [each.measured for each in found.rows] == [pytest.approx(2.0, rel=0.02)] * 2
    assert found.plain_step_s > 20 and found.changed == []
    assert engine.answered[:4] == [False, True, True, False]


@pytest.mark.parametrize("wrong", ["", "2", "1,1", "0.5,x"])
def test_sizes_that_are_not_known(wrong: str) -> None:
    with refuses(ConfigurationError, field="--sizes", allowed="different ones of 0.5, 1, 3, 7, comma-separated"):
        read_sizes(wrong)
    assert read_sizes("7, 0.5") == ("0.5", "7")


def test_what_becomes_of_a_dimension() -> None:
    old = Size(width=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_size=64)
    found = scaled_dimensions(old, old.filled(4032, 14336, 32), {1152}, 64)
    # The width, three of it side by side, the width beside a row of 64, the MLP, keys; its vocabulary stays.
    found_of = [found.get(size) for size in (576, 1728, 640, 1536, 192, 16384, 64)]
    assert found_of == [4032, 12096, 4096, 14336, 1344, None, None] and 1152 not in found
    twice = Size(width=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_size=16)
    with refuses(ConfigurationError, field="--model", value="of width 64 and MLP 128"):
        scaled_dimensions(twice, twice.filled(128, 512, 2))
    assert spread_layers([1, 14, 26], 30) == [0, 3, 5]


def test_a_size_that_does_not_fit_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sizes.stack.free_memory", lambda: 1024.0)
    with refuses(ConfigurationError, field="--sizes"):
        write_stack(tiny_model, tmp_path, 128, 256, 4)


@pytest.fixture(scope="module")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A target twice as wide as the tiny one."""
    return write_stack(tiny_model, tmp_path_factory.mktemp("stack"), 128, 256, 9).folders


def test_a_target_of_another_size(tiny_model: Path, stack: Mapping[str, Path]) -> None:
    own, layers = own_shape(tiny_model)
    assert numbers_of(tiny_model, own.width, own.intermediate, layers) > 0
    for name, count in (("one", 1), ("several", LAYERS)):
        config = json.loads((stack[name] / "config.json").read_text())
        assert (config["hidden_size"], config["num_hidden_layers"]) == (128, count)
        target = TransformersTarget(target_of(stack[name], TargetConfig(model_path="", threads=1), 8))
        try:
            assert target.vocab_size == config["vocab_size"]
        finally:
            target.shutdown()


Make = Callable[[Path, Path], Path]
HEADS: dict[str, Make] = {
    "fspad": lambda target, folder: make_head(target, folder, "fspad"),
    "medusa": make_medusa,
    "streaming": make_streams,
    "dflash": lambda target, folder: make_blocks(target, folder, kind="DSpark"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_drafter_of_another_size_drafts(tiny_model: Path, stack: Mapping[str, Path], tmp_path: Path, kind: str) -> None:
    target, (own, layers) = stack["several"], own_shape(tiny_model)
    made = inspect(HEADS[kind](tiny_model, tmp_path / "own"), tiny_model)
    folder = write_scaled(made, own, own.filled(128, 256, 9), layers, tmp_path / "scaled")
    scaled = inspect(folder, target)
    # Four times the weights, or nearly: what follows the vocabulary alone grows twice.
    assert scaled.source == made.source == kind and 1.9 < scaled.numbers / made.numbers < 4.1
    trained = TrainedConfig(checkpoints={kind: folder}, asked_for=False, target=target)
    source = cast(ModelSource, make_source(kind, DrafterConfig(trained=trained)))
    text = CostText(tokens=tuple(range(5, 85)), prompt_length=20, width=128, layers=scaled.layers)
    assert 0 < draft_seconds(source, text, nodes=7, tau=1.5, drafts=4) < 5


class _Slow:
    """A drafter that guesses nothing right, and notes what each pass has committed."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def open(self, message: OpenSession) -> _Slow:
        return self

    def observe(self, report: StepReport) -> None:
        self.committed.append(len(report.committed))

    def draft(self, batch: list[DraftWanted]) -> list[TokenTree | None]:
        return [None if len(self.committed) == 1 and self.later() else chain((9, 9), "slow")]

    def later(self) -> bool:
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked < 3

    def close(self) -> None: ...

    def forget(self, tenant: str) -> None: ...


def test_as_many_tokens_are_committed_as_with_the_default_model() -> None:
    slow = _Slow()
    text = CostText(tokens=joined([(1, 2, 3)], 80), prompt_length=10, width=4, layers=(-1,))
    draft_seconds(cast(ModelSource, slow), text, nodes=3, tau=2.5, drafts=6)
    # The first token comes with the prompt; then 2.5 a pass, in whole tokens.
    assert slow.committed == [1, 2, 3, 2, 3, 2, 3, 2, 3]


def test_tables_say_what_is_assumed_and_where_it_pays() -> None:
    rows = [row("", tau=1.5), row("fspad", tau=2.2), row("fspad", tau=2.5, beside=True)]
    sizes = [
        costs(size, {rows: step * (1 + rows / 64) for rows in ROWS}, fspad=share * step)
        for size, step, share in (("0.1", 0.01, 1.5), ("7", 0.7, 0.1))
    ]
    found = MeasuredSizes(rows=rows, sizes=sizes, numbers={"0.1": 10**8, "7": 7 * 10**9}, control=sizes[0])
    default, by_size, pays = tables_of(found)
    assert [each[0] for each in default.rows] == ["n-grams", "fspad", "fspad + n-grams"]
    assert all(len(each) == len(table.columns) for table in (default, by_size, pays) for each in table.rows)
    assert pays.rows == (("fspad", "7", "7", "7"),)
    assert "tau is the default model's, and is assumed" in by_size.note and "assumed" in pays.note
    # 2.2 * (65 / 64) / (0.1 + 80 / 64)
    assert {each[0]: each[2] for each in by_size.rows}["fspad"] == f"{2.2 * 65 / 64 / 1.35:.2f}x (15)"
    made = json.loads(json.dumps(as_object(found, {"command": "x"})))
    assert made["payoffs"] == [{"drafter": "fspad", "over_plain": "7", "over_ngrams": "7", "beside_ngrams": "7"}]
    assert made["sizes"][1]["parameters"] == 7 * 10**9


@pytest.mark.exhaustive
def test_the_whole_command_with_a_tiny_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sizes.stack.SIZES", {"0.5": (128, 256, 9), "1": (192, 384, 9)})
    monkeypatch.setattr("benchmarks.sizes.run.SIZES", {"0.5": (128, 256, 9), "1": (192, 384, 9)})
    heads = [HEADS[kind](tiny_model, tmp_path / kind) for kind in ("fspad", "medusa")]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the lazy fox\nthe quick dog\n")
    command = [
        "bench", "sizes", "--quick", "--model", str(tiny_model), "--drafters", ",".join(map(str, heads)), "--prompts",
        str(prompts), "--sizes", "0.5,1", "--nodes", "3,7", "--max-tokens", "12", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "| fspad + n-grams |" in done.stdout and "From which size on it pays" in done.stdout
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [size["size"] for size in results["sizes"]][1:] == ["0.5", "1"] and not results["changed"]
    assert (tmp_path / "out/plots/sizes.svg").is_file() and (tmp_path / "out/report.md").is_file()
    again = CliRunner().invoke(app, [*command[:-2], "--drafters", "nobody"])
    assert again.exit_code != 0 and "--drafters is nobody" in str(again.exception)


def test_random_weights_are_the_same_every_time(tiny_model: Path, tmp_path: Path) -> None:
    folders = [write_stack(tiny_model, tmp_path / name, 128, 256, 9).folders["one"] for name in ("a", "b")]
    first, second = (
        torch.frombuffer(bytearray((each / "ends.safetensors").read_bytes()), dtype=torch.uint8) for each in folders
    )
    assert torch.equal(first, second)
