"""DISCO (Mamou et al., 2024): Table 1, Table 2, F1 (Table 4), Figures 2, 5 and 6, a task at a time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.records import Prompt
from benchmarks.bench.tables import Table, number
from benchmarks.papers.drafter_weights import needed
from benchmarks.papers.units import Advance, Experiment, Paper, Results
from benchmarks.papers.workbench import Workbench
from benchmarks.stopping.lineup import StoppingBench, StoppingConfig, fastest_length, with_room
from benchmarks.stopping.report import summaries
from benchmarks.stopping.run import ORACLE, PLAIN, Comparison, compare_policies
from cluster.models.drafters import trained_config
from cluster.settings.component_configs import verifier_config
from services.drafter.stopping.transfer import read_transfer, transfer_file
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SWEEP, _LONGEST = 12, 20
# The threshold is the fastest of these on the prompts for tuning.
_THETAS = (0.2, 0.35, 0.5, 0.65, 0.8)
# Plain decoding, the oracle, two static lengths and five policies.
_MOST_POLICIES = 9
# By name, as the paper has them: speed-up on MBPP, HumanEval, CNN-DM and Alpaca.
_METHODS = {
    PLAIN: ("Target", "1.00x; 1.00x; 1.00x; 1.00x"),
    "heuristic": ("dynHeur SL", "1.16x; 1.04x; 1.81x; 1.50x"),
    "static 5": ("Static SL-5", "1.46x; 1.63x; 1.94x; 2.00x"),
    "SL-opt": ("Static SL-opt", "1.64x; 1.63x; 1.85x; 2.02x"),
    "confidence": ("confidence", "–"),
    "entropy": ("entropy (SVIP)", "–"),
    "disco": ("DISCO", "1.84x; 1.84x; 2.15x; 2.12x"),
    ORACLE: ("Oracle", "2.28x; 2.22x; 2.48x; 2.38x"),
}
_F1 = {"SL-opt": "85; –; 76; 68", "disco": "95; –; 88; 77"}
_ORACLE_LENGTHS = "18.0 ± 46.2; 14.7 ± 42.6; 3.2 ± 4.0; 2.4 ± 2.1"
_DEVIATIONS = (
    "The paper's figures are on MBPP, HumanEval (Starcoder 15B and 168M), CNN-DM and Alpaca (Vicuna 13B and 68M); ours are "
    "by task of the prompts file.",
    "Every second prompt of a task tunes the static length (SL-opt) and DISCO's threshold, both by measured seconds; the "
    "others are measured.",
    "One classifier serves all tasks. Where it was trained on prompts of one kind, the columns of the others show how it "
    "transfers.",
    f"Drafts end after {_LONGEST} tokens, also the oracle's; the paper's oracle has no such end.",
    "The confidence and entropy rows are not the paper's.",
    "F1 is of saying that a token will be accepted, which a policy says by drafting on behind it, over the tokens that the "
    "target judged. Drafts of one token (SL-opt 1, or a policy that always ends there) say so of none: their F1 is 0. A "
    "dash: no judged token was accepted or said to be.",
)
_TRANSFER = (
    "Transfer: a classifier for each kind of prompts (rows), with the threshold that is best there, on held-out answers to "
    "each kind (columns); the speed-up is by passes, at a draft pass's cost. `outrider train disco --transfer` makes it.",
)


def disco(bench: Workbench) -> Experiment:
    """The experiments, a unit for each task with two prompts.

    Raises:
        ConfigurationError: there is no draft model, no classifier, or no task with two prompts; says what to make.
    """
    draft = needed(bench, "draft_model").folder
    if (classifier := bench.classifier) is None:
        raise ConfigurationError(
            f"outrider train disco --data DATA --draft {draft} --out disco.safetensors makes one; outrider train data makes "
            "DATA",
            field="--classifier",
            verb="",
            value="is missing",
        )
    tasks: dict[str, list[Prompt]] = {}
    for prompt in bench.config.prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    units = [
        _Task(bench=bench, draft=draft, name=f"task-{at}", task=task, prompts=prompts, classifier=classifier)
        for at, (task, prompts) in enumerate(tasks.items(), 1)
        if len(prompts) > 1
    ]
    if not units:
        raise ConfigurationError("no task has two prompts, one of them for tuning; raise --per-task", about="--prompts")
    transfer = transfer_file(classifier)
    return Experiment(
        units=[*units, _Transfer(file=transfer)] if transfer.is_file() else units,
        deviations=(*_DEVIATIONS, *(_TRANSFER if transfer.is_file() else ())),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transfer:
    """Implements ``Unit``: what classifiers of one kind of prompts do on others, as ``outrider train disco`` found."""

    file: Path
    name: str = "transfer"
    answers: int = 0

    def measure(self, advance: Advance) -> dict[str, Any]:
        return {"cells": [asdict(cell) for cell in read_transfer(self.file)], "changed": []}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """Implements ``Unit``: all policies on the prompts of a task."""

    bench: Workbench
    draft: Path
    classifier: Path
    name: str
    task: str
    prompts: Sequence[Prompt]

    @property
    def answers(self) -> int:
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        tuning = turns - turns // 2
        return tuning * (1 + _SWEEP + len(_THETAS)) + self.bench.config.repeats * _MOST_POLICIES * (turns // 2)

    def measure(self, advance: Advance) -> dict[str, Any]:
        config = self.bench.config
        target = verifier_config(config.settings, config.model).target
        stopping = StoppingBench(
            StoppingConfig(
                target=with_room(target, target.cache_tokens), draft=self.draft, classifier=self.classifier,
                stop=trained_config(config.settings).stop,
                params=SamplingParams(temperature=0, max_tokens=config.max_tokens), sweep=_SWEEP, longest=_LONGEST,
                seed=config.seed, prompts=self.prompts, tuning=None,
            )
        )  # fmt: skip
        try:
            best = fastest_length(stopping.static_lengths(advance))
            theta = stopping.tune_theta(_THETAS, advance)
            found = compare_policies(
                stopping.decoder, stopping.requests, stopping.contestants(best), config.repeats, _LONGEST, advance
            )
        finally:
            stopping.target.shutdown()
        return _as_object(self.task, found, theta, best)


def _as_object(task: str, found: Comparison, theta: float, best: int) -> dict[str, Any]:
    oracle = [[step.drafted for step in run.steps] for run in found.runs if run.contestant == ORACLE and not run.repeat]
    return {
        "task": task,
        "theta": theta,
        "best": best,
        "policies": [asdict(summary) for summary in summaries(found)],
        "oracle": oracle,
        "changed_policies": list(found.changed),
        "changed": [f"an answer under {name}" for name in found.changed],
    }


def _tables(results: Results) -> list[Table]:
    return [
        *_task_tables(_of_tasks(results)),
        *(_transfer_table(each["cells"]) for each in results.values() if "cells" in each),
    ]


def _of_tasks(results: Results) -> Results:
    return {name: result for name, result in results.items() if "task" in result}


def _transfer_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """F1 and speed of classifiers, by the kind of prompts that each was trained on."""
    kinds = tuple(dict.fromkeys(cell["trained"] for cell in cells))
    found = {(cell["trained"], cell["measured"]): cell for cell in cells}
    return Table(
        title="Transfer: F1 of stopping, %, and speed-up by passes",
        columns=("trained on", *kinds, "in the paper"),
        rows=tuple(
            (
                kind,
                *(f"{100 * found[kind, other]['f1']:.0f}, {found[kind, other]['speed']:.2f}x" for other in kinds),
                "–",
            )
            for kind in kinds
        ),
    )


def _task_tables(results: Results) -> list[Table]:
    by_task = {result["task"]: _by_method(result) for result in results.values()}
    tasks = tuple(by_task)
    speeds = Table(
        title="Table 1: speed-up over the target alone, greedy",
        columns=("method", *tasks, "= plain", "in the paper"),
        rows=tuple(
            (label, *(_speed_up(by_task[task], name) for task in tasks), _same(by_task, results, name), paper)
            for name, (label, paper) in _METHODS.items()
            if any(name in methods for methods in by_task.values())
        ),
        note="; ".join(f"{each['task']}: SL-opt {each['best']}, θ {each['theta']}" for each in results.values()),
    )
    f1 = Table(
        title="Table 4: F1 of stopping, %",
        columns=("method", *tasks, "in the paper"),
        rows=tuple(
            (
                _METHODS[name][0],
                *(number(100 * by_task[task][name]["f1"], ".0f") if name in by_task[task] else "–" for task in tasks),
                paper,
            )
            for name, paper in _F1.items()
        ),
    )
    lengths = [[length for steps in result["oracle"] for length in steps] for result in results.values()]
    oracle = Table(
        title="Table 2: the oracle's length, mean ± standard deviation",
        columns=("", *tasks, "in the paper"),
        rows=(
            (
                "oracle SL",
                *(f"{statistics.fmean(each):.1f} ± {statistics.pstdev(each):.1f}" if each else "–" for each in lengths),
                _ORACLE_LENGTHS,
            ),
        ),
    )
    return [speeds, oracle, f1] if tasks else []


def _by_method(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Summaries by name; the static length that tuning chose is SL-opt, whichever it is."""
    found = {policy["name"]: policy for policy in result["policies"]}
    chosen = f"static {result['best']}"
    return {**found, "SL-opt": found.get(f"{chosen} SL-opt", found.get(chosen, {}))}


def _speed_up(methods: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if name not in methods:
        return "–"
    return f"{sum(methods[PLAIN]['seconds']) / sum(methods[name]['seconds']):.2f}x"


def _same(by_task: Mapping[str, Mapping[str, Mapping[str, Any]]], results: Results, name: str) -> str:
    """Of how many tasks all answers equal plain decoding's."""
    told = [(by_task[each["task"]][name], each) for each in results.values() if name in by_task[each["task"]]]
    equal = sum(policy["name"] not in result["changed_policies"] for policy, result in told)
    return f"{equal} of {len(told)} tasks" + ("" if equal == len(told) else " **CHANGED**")


def _plot_histogram(axes: Axes, results: Any) -> bool:
    for result in _of_tasks(results["units"]).values():
        lengths = [length for steps in result["oracle"] for length in steps]
        axes.hist(lengths, bins=range(_LONGEST + 2), density=True, histtype="step", label=result["task"])
    axes.set_xlabel("oracle's length")
    axes.set_ylabel("share of the steps")
    return _legend(axes, results)


def _plot_over_answers(axes: Axes, results: Any) -> bool:
    for result in _of_tasks(results["units"]).values():
        buckets: list[list[int]] = [[] for _ in range(_BUCKETS)]
        for steps in result["oracle"]:
            for at, length in enumerate(steps):
                buckets[min(_BUCKETS - 1, _BUCKETS * at // max(1, len(steps) - 1))].append(length)
        known = [(at / _BUCKETS, statistics.fmean(each)) for at, each in enumerate(buckets) if each]
        axes.plot([at for at, _ in known], [mean for _, mean in known], marker="o", label=result["task"])
    axes.set_xlabel("normalised index of the step")
    axes.set_ylabel("mean oracle length")
    return _legend(axes, results)


def _plot_one_answer(axes: Axes, results: Any) -> bool:
    for result in _of_tasks(results["units"]).values():
        axes.step(range(len(result["oracle"][0])), result["oracle"][0], where="mid", label=result["task"])
    axes.set_xlabel("step of the first answer")
    axes.set_ylabel("oracle's length")
    return _legend(axes, results)


def _legend(axes: Axes, results: Any) -> bool:
    drawn = bool(results["units"])
    if drawn:
        axes.legend(frameon=False, fontsize=8)
    return drawn


_BUCKETS = 10

PAPER = Paper(
    name="disco",
    title="DISCO",
    about="Mamou et al., 2024: a classifier that ends a draft model's chain",
    tables=_tables,
    plots=(
        ("disco-one-answer", "Figure 2: the oracle's length over one answer", _plot_one_answer),
        ("disco-lengths", "Figure 5: how long the oracle drafts", _plot_histogram),
        ("disco-over-answers", "Figure 6: the oracle's length over the answers", _plot_over_answers),
    ),
)
