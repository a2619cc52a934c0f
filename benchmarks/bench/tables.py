"""The tables of a result, for the terminal, HTML and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.bench.left_out import left_out_lines
from benchmarks.bench.measures import Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text. The first column is a name, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


Results = Mapping[str, Any]

_SPEED_NOTE = (
    "medians of the repeats, lowest and highest; = plain, = hf: answers that are equal token for token; "
    "unclear: the repeats lie more than 25 % apart, or on both sides of 1, or there is only one"
)


def all_tables(results: Results) -> list[Table]:
    """All tables that are not empty."""
    tables = [_contestants(results)]
    for concurrency in results["settings"]["concurrency"]:
        records = [record for record in results["summary"] if record["concurrency"] == concurrency]
        if records:
            tables.append(_speed(results, records, concurrency))
            tables.append(_over_peers(results, records, concurrency))
            tables.append(_inside(results, records, concurrency))
    tables.append(_by_task(results, "speed_up", "Speed-up over plain decoding, task by task"))
    tables.append(_by_task(results, "tau", "Tokens per pass, task by task"))
    tables.append(_differences(results))
    return [table for table in tables if table.rows]


def ratio(values: Mapping[str, Any]) -> str:
    """A ratio with its spread, or "unclear" where it is unreliable."""
    if not values["values"]:
        return "–"
    spread = Spread(tuple(values["values"]))
    text = f"{spread.low:.2f}–{spread.high:.2f}" if len(spread.values) > 1 else f"{spread.median:.2f}"
    return f"{spread.median:.2f}x ({text})" if spread.unclear is None else f"unclear: {text}"


def number(value: float | None, form: str = ".1f") -> str:
    """A formatted number; a dash for None and nan."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def as_object(table: Table) -> dict[str, Any]:
    """The table for programs: its rows by the names of its columns; the first column may have none."""
    columns = [column or "name" for column in table.columns]
    return {
        "title": table.title,
        "note": table.note,
        "rows": [dict(zip(columns, row, strict=True)) for row in table.rows],
    }


def render(table: Table) -> RichTable:
    """The table for the terminal."""
    # Names and messages come from files and other programs, so they must not be read as markup.
    caption = escape(table.note) if table.note else None
    rich = RichTable(title=escape(table.title), title_justify="left", caption=caption, caption_justify="left")
    for index, column in enumerate(table.columns):
        style = {"no_wrap": True, "style": "bold"} if index == 0 else {"justify": "right", "overflow": "fold"}
        rich.add_column(escape(column), **style)
    for row in table.rows:
        rich.add_row(*map(escape, row))
    return rich


def markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [
        f"**{table.title}**",
        "",
        _line(table.columns),
        _line("---" if not i else "---:" for i in range(len(table.columns))),
    ]
    lines += [_line(row) for row in table.rows]
    return "\n".join([*lines, *(["", table.note] if table.note else []), ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _contestants(results: Results) -> Table:
    rows = []
    for name, entry in results["contestants"].items():
        versions = ", ".join(f"{package} {version}" for package, version in entry["versions"].items())
        memory = entry["peak_memory_bytes"]
        rows.append((name, entry["status"], number(memory / 2**20 if memory else None, ",.0f"), versions))
    note = "\n".join(f"{name}: {entry['note']}" for name, entry in results["contestants"].items() if entry["note"])
    return Table(
        title="Contestants", columns=("contestant", "state", "peak memory MiB", "versions"), rows=tuple(rows), note=note
    )


def _speed(results: Results, records: list[dict[str, Any]], concurrency: int) -> Table:
    base = results["settings"]["base"]
    rows = []
    for record in records:
        speed, latency = record["tokens_per_second"], record["latency"]
        rows.append(
            (
                record["contestant"],
                number(speed["median"]),
                f"{number(speed['low'])}–{number(speed['high'])}",
                number(record["macro_tokens_per_second"]["median"]),
                _against(record, base),
                number(1e3 * latency["ttft_median_s"], ".0f"),
                number(1e3 * latency["itl_median_s"]),
                number(1e3 * latency["gap_p99_s"], ".0f"),
                *(_lossless(results, record["contestant"], against) for against in ("plain", "hf")),
            )
        )
    return Table(
        title=f"Speed, {_at_once(results, concurrency)}",
        columns=(
            "contestant", "tok/s", "repeats", "macro", "vs plain", "TTFT ms", "ITL ms", "gap p99", "= plain", "= hf",
        ),
        rows=tuple(rows),
        note=_SPEED_NOTE,
    )  # fmt: skip


def _over_peers(results: Results, records: list[dict[str, Any]], concurrency: int) -> Table:
    peers = [name for name in results["settings"]["peers"] if any(record["contestant"] == name for record in records)]
    ours = [record for record in records if record["contestant"] in results["settings"]["strategies"]]
    rows = tuple((record["contestant"], *(_against(record, peer) for peer in peers)) for record in ours)
    return Table(
        title=f"Speed-up over peers, {_at_once(results, concurrency)}",
        columns=("strategy", *peers),
        rows=rows if peers else (),
    )


def _at_once(results: Results, concurrency: int) -> str:
    """The concurrency, with a note if there were fewer requests than that."""
    requests = results["settings"]["requests"]
    return f"{concurrency} at once" + (f": all {requests} requests, there were no more" if requests < concurrency else "")


def _against(record: Mapping[str, Any], other: str) -> str:
    if record["contestant"] == other:
        return "1"
    return ratio(record["speed_up"][other]) if other in record["speed_up"] else "–"


def _lossless(results: Results, contestant: str, against: str) -> str:
    for check in results["lossless"]["checks"]:
        if (check["contestant"], check["against"]) == (contestant, against):
            every = f"{check['equal']}/{check['answers']}"
            return f"yes ({every})" if check["equal"] == check["answers"] else f"NO ({every})"
    return "–"


def _inside(results: Results, records: list[dict[str, Any]], concurrency: int) -> Table:
    rows = []
    for record in records:
        loop = record["loop"]
        if loop is None:
            continue
        shares = loop["shares"]
        positions = " ".join(f"{share:.2f}" for share in record["acceptance_per_position"][:6])
        sources = " ".join(f"{source} {share:.2f}" for source, share in loop["acceptance_by_source"].items())
        rows.append(
            (
                record["contestant"],
                number(record["tau"], ".2f"),
                # Results that were written before have none.
                number(record.get("seconds_saved"), "+.2f"),
                number(loop["nodes_per_pass"]),
                *(f"{shares[part]:.1%}" for part in ("draft", "rpc", "verify", "other", "idle")),
                f"{loop['draft_ahead_hits']:.0%}",
                positions or "–",
                sources or "–",
            )
        )
    return Table(
        title=f"Inside Outrider, {_at_once(results, concurrency)}",
        columns=(
            "strategy", "tau", "saved/answer", "nodes/pass", "draft", "RPC", "verify", "other", "idle", "draft-ahead",
            "acceptance at 1, 2, ...", "per source",
        ),
        rows=tuple(rows),
        note="\n".join(line for record in records for line in left_out_lines(record["contestant"], record["loop"] or {})),
    )  # fmt: skip


def _by_task(results: Results, measure: str, title: str) -> Table:
    # Only concurrency 1 is measured task by task.
    records = [record for record in results["summary"] if record["concurrency"] == 1]
    if measure == "speed_up":
        records = [record for record in records if record["contestant"] != results["settings"]["base"]]
    records = [record for record in records if any(_cell(task[measure]) != "–" for task in record["tasks"].values())]
    tasks = list(dict.fromkeys(task for record in records for task in record["tasks"]))
    rows = [(task, *(_cell(record["tasks"].get(task, {}).get(measure)) for record in records)) for task in tasks]
    columns = ("task", *(record["contestant"] for record in records))
    return Table(title=title, columns=columns, rows=tuple(rows))


def _cell(value: Any) -> str:
    return ratio(value) if isinstance(value, Mapping) else number(value, ".2f")


def _differences(results: Results) -> Table:
    rows = []
    for entry in results["lossless"]["differences"]:
        logits = entry["logits"] or ()
        close = {True: "near tie", False: "NOT a tie", None: "–"}[entry["near_tie"]]
        rows.append(
            (
                entry["contestant"],
                entry["against"],
                entry["request"],
                str(entry["position"]),
                _token(entry["token"]),
                _token(entry["reference_token"]),
                " / ".join(f"{value:.5f}" for value in logits) or "–",
                close,
                str(entry["times"]),
            )
        )
    return Table(
        title="Answers that differ",
        columns=("contestant", "from", "request", "position", "token", "reference", "logits", "", "times"),
        rows=tuple(rows),
    )


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)
