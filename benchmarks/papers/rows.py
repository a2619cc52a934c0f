"""Rows that decode: one way of drafting, measured beside plain decoding and compared with it, token for token."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.bench.records import Request
from benchmarks.bench.tables import Table
from benchmarks.papers.engine import Decoded, RowDrafting, differs_at
from benchmarks.papers.units import Advance, Results
from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.folder import read_json
from speculation.types import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RowDecoder(Protocol):
    """What decodes for a row: a ``PaperEngine``."""

    def draft(self, drafting: RowDrafting) -> None:
        """Draft with a new drafter."""

    def answer(self, request: Request, params: SamplingParams, *, plainly: bool = False) -> Decoded:
        """Decode a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedRow:
    """A row of a table. Implements ``Unit``.

    Attributes:
        label: as the paper names it.
        paper: the paper's figures.
        decoder, drafting, requests: made when the row is measured, since they load models.
        extra: what else the page tells of the row, such as its drafter's parameters.
    """

    name: str
    label: str
    paper: str
    decoder: Callable[[], RowDecoder]
    drafting: Callable[[], RowDrafting]
    requests: Callable[[], Sequence[Request]]
    answers: int
    max_tokens: int
    temperature: float = 0.0
    extra: Callable[[], Mapping[str, Any]] = field(default=dict)

    def measure(self, advance: Advance) -> dict[str, Any]:
        # Requests first: to make them may take another engine than the row's, and there is one at a time.
        requests = self.requests()
        decoder = self.decoder()
        decoder.draft(self.drafting())
        # The first answer of a process, and of a drafter, is slower.
        decoder.answer(requests[0], self._params(requests[0], most=8))
        answers = []
        for number, request in enumerate(requests):
            answers.append(self._answered(decoder, request, plain_first=number % 2 == 0))
            advance()
        changed = [f"{each['request']} at token {each['differs_at']}" for each in answers if each["differs_at"] is not None]
        return {"label": self.label, "paper": self.paper, "changed": changed, "answers": answers, **self.extra()}

    def _answered(self, decoder: RowDecoder, request: Request, *, plain_first: bool) -> dict[str, Any]:
        params = self._params(request)
        # By turns: who always comes second looks faster on a machine that becomes so.
        order = (True, False) if plain_first else (False, True)
        decoded = {plainly: decoder.answer(request, params, plainly=plainly) for plainly in order}
        plain, ours = decoded[True], decoded[False]
        return {
            "request": request.id,
            "task": request.task,
            "tokens": len(ours.tokens),
            "differs_at": differs_at(ours.tokens, plain.tokens),
            "plain_s": plain.seconds,
            "seconds": ours.seconds,
            "plain_steps": _steps(plain),
            "steps": _steps(ours),
            "drafted_by": ours.drafted_by,
            "accepted_by": ours.accepted_by,
        }

    def _params(self, request: Request, most: int | None = None) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=most or self.max_tokens, seed=request.seed)


def _steps(decoded: Decoded) -> list[tuple[float, int]]:
    """(seconds, tokens) of every pass; the first one, which reads the prompt, has no seconds."""
    before, steps = None, []
    for at, count in decoded.arrivals:
        steps.append((0.0 if before is None else at - before, count))
        before = at
    return steps


# --- figures of rows, over answers as ``measure`` tells them ---------------------------------------------------------

Answers = Sequence[Mapping[str, Any]]


def tau(answers: Answers) -> float:
    """Tokens per pass of the target (tau, compression ratio)."""
    tokens: int = sum(each["tokens"] for each in answers)
    return tokens / max(1, passes(answers))


def passes(answers: Answers) -> int:
    """Passes of the target."""
    return sum(len(each["steps"]) for each in answers)


def speed_up(answers: Answers) -> float:
    """Seconds of plain decoding over seconds of the row, for the same answers."""
    return _over(sum(each["plain_s"] for each in answers), sum(each["seconds"] for each in answers))


def macro_speed_up(answers: Answers) -> float:
    """The same by the mean over steps of each step's tokens per second (SPECTRA's Mac-TP)."""
    return _over(_macro(answers, "steps"), _macro(answers, "plain_steps"))


def _macro(answers: Answers, steps: str) -> float:
    speeds = [count / seconds for each in answers for seconds, count in each[steps] if seconds]
    return statistics.fmean(speeds) if speeds else 0.0


def _over(above: float, below: float) -> float:
    return above / below if below else float("nan")


def step_cost(answers: Answers) -> float:
    """Seconds of a step over those of plain decoding's. Drafting pays where this is below tau."""
    return _over(_step_seconds(answers, "steps"), _step_seconds(answers, "plain_steps"))


def _step_seconds(answers: Answers, steps: str) -> float:
    taken = [seconds for each in answers for seconds, _ in each[steps] if seconds]
    return statistics.fmean(taken) if taken else 0.0


def same(answers: Answers) -> str:
    """How many answers equal plain decoding's."""
    equal = sum(each["differs_at"] is None for each in answers)
    return f"{equal} of {len(answers)}" + ("" if equal == len(answers) else " **CHANGED**")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A figure of a row, of the answers of one task or of all."""

    title: str
    figure: Callable[[Answers], str]
    task: str | None = None


SPEED_UP = Column(title="speed-up", figure=lambda answers: f"{speed_up(answers):.2f}x")
TAU = Column(title="τ", figure=lambda answers: f"{tau(answers):.2f}")
STEP_COST = Column(title="a step costs", figure=lambda answers: f"{step_cost(answers):.1f}")


def figure_table(title: str, rows: Iterable[str], results: Results, columns: Sequence[Column], note: str = "") -> Table:
    """A table of measured rows: their figures, how many answers equal plain decoding's, and the paper's."""
    made = []
    for name in rows:
        if (result := results.get(name)) is None:
            continue
        told = []
        for column in columns:
            answers = [each for each in result["answers"] if column.task in (None, each["task"])]
            told.append(column.figure(answers) if answers else "–")
        # Of a target that was tuned, how many of its answers are the target's own.
        equal = result.get("as_the_target") or same(result["answers"])
        made.append((result["label"], *told, equal, result["paper"]))
    titles = [column.title for column in columns]
    return Table(title=title, columns=("method", *titles, "= plain", "in the paper"), rows=tuple(made), note=note)


def usual_columns(results: Results, rows: Iterable[str]) -> list[Column]:
    """Speed-up, tau and a step's cost over all answers, and the first two of each task where there are several."""
    tasks = list(dict.fromkeys(each["task"] for name in rows if name in results for each in results[name]["answers"]))
    columns = [SPEED_UP, TAU, STEP_COST]
    if len(tasks) > 1:
        columns += [Column(title=task, figure=lambda a: f"{speed_up(a):.2f}x, {tau(a):.2f}", task=task) for task in tasks]
    return columns


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Tokens per pass and speed-up of rows (what they are called, and their results), as pairs of bars."""
    for at, (_, result) in enumerate(rows):
        answers = result["answers"]
        for shift, figure, colour, name in ((-0.2, tau, "#4c72b0", "τ"), (0.2, speed_up, "#dd8452", "speed-up")):
            height = figure(answers)
            axes.bar(at + shift, height, 0.38, color=colour, label=name if at == 0 else None)
            axes.annotate(f"{height:.2f}", (at + shift, height), ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [label.replace(", ", ",\n") for label, _ in rows], fontsize=8)
    axes.set_ylabel("against plain decoding")
    if rows:
        axes.legend(frameon=False, loc="upper left")
    return bool(rows)


def training_losses(folder: Path) -> Mapping[str, Any]:
    """What a drafter's record tells of its losses, for ``DecodedRow.extra``; nothing where it does not."""
    record = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    curves = record.get("losses")
    return {"losses": curves} if isinstance(curves, dict) and curves.get("step") else {}


def draw_curves(axes: Axes, curves: Sequence[tuple[str, Mapping[str, Sequence[float]]]], what: str) -> bool:
    """Curves by ``step``, each with what it is called; those that are called alike have one colour, each part a style."""
    labels = list(dict.fromkeys(label for label, _ in curves))
    told = set()
    for label, parts in curves:
        for part, style in zip([each for each in parts if each != "step"], ("-", "--", ":", "-."), strict=False):
            name = None if (label, part) in told else f"{label}: {part}"
            axes.plot(parts["step"], parts[part], style, color=f"C{labels.index(label)}", linewidth=1, label=name)
            told.add((label, part))
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    if curves:
        axes.figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return bool(curves)
