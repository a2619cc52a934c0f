"""``outrider top``: what a running service does now, as a table that renews itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cli.scraping import Reading, read

_Value = TypeVar("_Value")
_Row = tuple[str, str, str]
_MOST_ROWS = 16


def show_top(urls: Sequence[str], *, interval_s: float, once: bool) -> None:
    """Show a service's numbers until Ctrl-C; with ``once``, print them after one interval and return.

    Raises:
        OutriderError: nothing of Outrider answers at ``urls``.
    """
    before = read(urls)
    console = Console()
    if once:
        time.sleep(interval_s)
        console.print(tables(before, read(urls)))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            now = read(urls)
            live.update(tables(before, now), refresh=True)
            before = now


def tables(before: Reading, now: Reading) -> Group:
    """Two readings as tables."""
    grown = now.since(before)
    parts = [_overview(now, grown), _strategies(now, grown), _sources(now, grown)]
    if now.values.get(_SAVED):
        parts.append(_loads(now, grown))
    return Group(*parts)


def _overview(now: Reading, grown: Reading) -> Table:
    table = Table(title=f"outrider top, over the last {grown.at:.1f} s", title_justify="left")
    for column in ("", "now", "since the start"):
        table.add_column(column, justify="left" if not column else "right")
    for row in (*_requests(now, grown), *_steps(now, grown), *_troubles(now, grown)):
        table.add_row(*row)
    return table


def _requests(now: Reading, grown: Reading) -> list[_Row]:
    def per_second(name: str) -> str:
        return f"{grown.sum(name) / max(grown.at, 1e-9):,.1f}/s"

    return [
        ("requests open, running, waiting", ", ".join(_count(now.sum(name)) for name in _LOAD), ""),
        ("requests ended", per_second("requests_total"), _count(now.sum("requests_total"))),
        ("tokens answered", per_second("generation_tokens_total"), _count(now.sum("generation_tokens_total"))),
        ("tokens of prompts", per_second("prompt_tokens_total"), _count(now.sum("prompt_tokens_total"))),
        ("first token, half within", *_both(now, grown, lambda r: r.quantile("time_to_first_token_seconds", 0.5), _time)),
        ("first token, 99 % within", *_both(now, grown, lambda r: r.quantile("time_to_first_token_seconds", 0.99), _time)),
        ("seconds per token", *_both(now, grown, lambda r: r.average("request_time_per_output_token_seconds"), _time)),
    ]


def _steps(now: Reading, grown: Reading) -> list[_Row]:
    def cached(reading: Reading) -> float | None:
        return _share(reading.sum("prefix_cache_hits_total"), reading.sum("prefix_cache_queries_total"))

    def waiting(reading: Reading) -> float | None:
        waited, passes = reading.sum("draft_wait_seconds_sum"), reading.sum("step_seconds_sum")
        return _share(waited, waited + passes)

    return [
        ("a step", *_both(now, grown, lambda r: r.average("step_seconds"), _time)),
        ("rows, drafted tokens a step", *_both(now, grown, _rows_and_nodes, str)),
        ("time spent waiting for drafts", *_both(now, grown, waiting, _percent)),
        ("tokens per pass", *_both(now, grown, _tokens_per_pass, _number)),
        ("saved by drafting, all answers", *_both(now, grown, _saved, _signed)),
        ("key-value cache in use", _percent(now.mean("kv_cache_usage_ratio")), ""),
        ("prompt tokens that were cached", *_both(now, grown, cached, _percent)),
    ]


def _troubles(now: Reading, grown: Reading) -> list[_Row]:
    rows = []
    for label, name in _TROUBLES:
        rows.append((label, _count(grown.sum(name)), _count(now.sum(name))))
    for label, outcome in (("refused requests", "refused"), ("failed requests", "error")):
        now_count, grown_count = (each.sum("requests_total", outcome=outcome) for each in (now, grown))
        rows.append((label, _count(grown_count), _count(now_count)))
    return rows


def _strategies(now: Reading, grown: Reading) -> Table:
    table = Table(title="Strategies", title_justify="left")
    for column in ("strategy", "drafted", "accepted", "accepted, now", "per pass, now", "per pass", "saved, now", "saved"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    # Those that draft nothing may wait for others' drafts: that is shown, too.
    rest = now.by(_SAVED, "strategy")
    for name in _largest(rest | now.by("spec_decode_num_draft_tokens_total", "strategy")):
        drafted, accepted = (now.sum(total, strategy=name) for total in _DRAFTED_ACCEPTED)
        lately = [grown.sum(total, strategy=name) for total in _DRAFTED_ACCEPTED]
        share = _said(_share(lately[1], lately[0]), _percent)
        per_pass = [_said(_tokens_per_pass(each, strategy=name), _number) for each in (grown, now)]
        saved = [_said(_saved(each, strategy=name), _signed) for each in (grown, now)]
        table.add_row(name, _count(drafted), _said(_share(accepted, drafted), _percent), share, *per_pass, *saved)
    return table


def _loads(now: Reading, grown: Reading) -> Table:
    table = Table(title="Saved by drafting, by requests decoded at once", title_justify="left")
    for column in ("requests", "now", "since the start"):
        table.add_column(column, justify="left" if column == "requests" else "right")
    for load in sorted(now.by(_SAVED, "requests"), key=lambda load: int(load.partition("-")[0])):
        table.add_row(load, *_both(now, grown, partial(_saved, requests=load), _signed))
    return table


def _sources(now: Reading, grown: Reading) -> Table:
    table = Table(title="Sources", title_justify="left")
    for column in ("source", "drafted", "accepted", "accepted, now", "of all accepted"):
        table.add_column(column, justify="left" if column == "source" else "right")
    everything = now.sum("accepted_by_source_total")
    for name in _largest(now.by("drafted_by_source_total", "source")):
        drafted, accepted = (now.sum(total, source=name) for total in _BY_SOURCE)
        lately = [grown.sum(total, source=name) for total in _BY_SOURCE]
        table.add_row(
            name,
            _count(drafted),
            _said(_share(accepted, drafted), _percent),
            _said(_share(lately[1], lately[0]), _percent),
            _said(_share(accepted, everything), _percent),
        )
    return table


_LOAD = ("num_requests_open", "num_requests_running", "num_requests_waiting")
_DRAFTED_ACCEPTED = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
_SAVED = "spec_decode_seconds_saved"
_BY_SOURCE = ("drafted_by_source_total", "accepted_by_source_total")
_TROUBLES = (
    ("drafts missed", "drafts_missed_total"),
    ("preemptions", "preemptions_total"),
    ("migrations", "migrations_total"),
    ("refused API keys", "auth_failures_total"),
    ("limits reached", "rate_limited_total"),
)


def _tokens_per_pass(reading: Reading, **labels: str) -> float | None:
    tokens, passes = (reading.sum(f"spec_decode_num_{what}_total", **labels) for what in ("emitted_tokens", "passes"))
    return _share(tokens, passes)


def _saved(reading: Reading, **labels: str) -> float | None:
    return reading.sum(_SAVED, **labels) if reading.values.get(_SAVED) else None


def _rows_and_nodes(reading: Reading) -> str | None:
    rows, nodes = reading.average("step_rows"), reading.average("budget_nodes")
    return None if rows is None or nodes is None else f"{rows:.1f}, {nodes:.1f}"


def _both(
    now: Reading, grown: Reading, of: Callable[[Reading], _Value | None], say: Callable[[_Value], str]
) -> tuple[str, str]:
    """A number of the last interval, and of all time."""
    return _said(of(grown), say), _said(of(now), say)


def _said(value: _Value | None, say: Callable[[_Value], str]) -> str:
    return "-" if value is None else say(value)


def _largest(counts: dict[str, float]) -> list[str]:
    return sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])[:_MOST_ROWS]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(seconds: float) -> str:
    """Seconds saved; below zero, those that drafting cost."""
    return f"{seconds:+,.1f} s"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
