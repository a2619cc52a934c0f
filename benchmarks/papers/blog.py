"""The blog on speculative sampling and n-gram decoding: its two tables, by our prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.bench.tables import Table
from benchmarks.papers.drafter_weights import left_out
from benchmarks.papers.engine import RowDrafting, with_trained
from benchmarks.papers.rows import SPEED_UP, STEP_COST, TAU, Answers, Column, DecodedRow, draw_rows, figure_table
from benchmarks.papers.units import Experiment, Paper, Results
from benchmarks.papers.workbench import Workbench
from services.drafter.config import DrafterConfig, PromptLookupConfig, StopConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The blog's K of each table, and its n-gram.
_K_DRAFT, _K_NGRAM, _NGRAM = 4, 10, 3
_TABLES = {
    "Speculative sampling": ("sampling", "sampling-sampled"),
    "N-gram decoding": ("ngram",),
}
_DEVIATIONS = (
    "The blog's targets are Llama 3.1 70B with its 8B model as the draft model, and Llama 3.1 8B; one prompt each. It "
    "counts tokens beyond the answer's end, so that its 2.61x is 2.45x by the clock.",
    "The blog accepts a draft by rejection sampling, and its code takes all tokens unless the first is refused. Here the "
    "target's own seeded choices decide, so that answers are plain decoding's.",
    "N-gram decoding takes the latest occurrence of the longest n-gram; the blog takes one at random among those with the "
    "longest continuation.",
)


def blog(bench: Workbench) -> Experiment:
    """The experiments. Speculative sampling is left out where there is no draft model."""
    units = [_unit(bench, "ngram", "Ngrams decoding", "~2x", "prompt_lookup", _K_NGRAM)]
    if "draft_model" not in bench.checkpoints:
        return Experiment(units=units, deviations=(*_DEVIATIONS, left_out("draft_model")))
    sampled = [
        _unit(bench, "sampling", "Speculative Sampling", "~2.61x", "draft_model", _K_DRAFT),
        _unit(bench, "sampling-sampled", "Speculative Sampling, temperature 1", "–", "draft_model", _K_DRAFT, 1.0),
    ]
    return Experiment(units=[*sampled, *units], deviations=_DEVIATIONS)


def _unit(
    bench: Workbench, name: str, label: str, paper: str, source: str, nodes: int, temperature: float = 0.0
) -> DecodedRow:
    return bench.row(
        name=name,
        label=label,
        paper=paper,
        drafting=lambda: RowDrafting(sources=(source,), nodes=nodes, config=_as_in_the_blog(bench.engine().config)),
        temperature=temperature,
    )


def _as_in_the_blog(config: DrafterConfig) -> DrafterConfig:
    lookup = PromptLookupConfig(prompt_lookup_max=_NGRAM, prompt_lookup_min=_NGRAM, max_branches=1)
    stop = StopConfig(policy="static", num_assistant_tokens=_K_DRAFT)
    return replace(with_trained(config, stop=stop, eagle_topk=1), prompt_lookup=lookup)


def _tables(results: Results) -> list[Table]:
    tables = [figure_table(title, names, results, _COLUMNS) for title, names in _TABLES.items()]
    return [table for table in tables if table.rows]


def _tokens_per_second(answers: Answers) -> str:
    seconds = sum(each["seconds"] for each in answers)
    # The first token of an answer comes with its prompt, before the clock starts.
    return f"{sum(each['tokens'] - 1 for each in answers) / seconds:.1f}" if seconds else "–"


_COLUMNS = (
    Column(title="seconds", figure=lambda answers: f"{sum(each['seconds'] for each in answers):.1f}"),
    Column(title="plain, seconds", figure=lambda answers: f"{sum(each['plain_s'] for each in answers):.1f}"),
    Column(title="tokens/s", figure=_tokens_per_second),
    SPEED_UP,
    TAU,
    STEP_COST,
)


def _plot_rows(axes: Axes, results: Any) -> bool:
    units = results["units"]
    names = [name for table in _TABLES.values() for name in table if name in units]
    return draw_rows(axes, [(units[name]["label"], units[name]) for name in names])


PAPER = Paper(
    name="blog",
    title="Speculative sampling and n-gram decoding",
    about="A blog's two demonstrations: a draft model, and n-grams of prompt and answer",
    tables=_tables,
    plots=(("blog-methods", "Both tables: tokens per pass and speed-up", _plot_rows),),
)
