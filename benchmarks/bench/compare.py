"""``outrider bench compare A B``: which changes are larger than the spread of the repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.bench.tables import Table, number
from speculation.errors import ConfigurationError

Results = Mapping[str, Any]

_WORKLOAD = ("model", "dtype", "device", "on", "requests", "max_tokens", "temperature", "seed")
_MACHINE = ("processor", "cores", "gpus", "threads", "python")


def compare(a: Results, b: Results) -> list[Table]:
    """Tables of the differences in environment, speed and speed-up.

    Raises:
        ConfigurationError: the runs measured different work; says in what they differ.
    """
    apart = [
        f"{key} {a['settings'].get(key)} and {b['settings'].get(key)}" for key in _WORKLOAD if _differ(a, b, "settings", key)
    ]
    if [_identity(request) for request in a["requests"]] != [_identity(request) for request in b["requests"]]:
        apart.append("their prompts")
    if apart:
        raise ConfigurationError(f"the two runs did different work: {', '.join(apart)}", about=", ".join(apart))
    tables = (_surroundings(a, b), _speeds(a, b), _speed_ups(a, b))
    return [table for table in tables if table.rows]


def verdict(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """What two spreads say in words: they differ only if their repeats do not overlap."""
    if not a["values"] or not b["values"]:
        return "–"
    change = f"{b['median'] / a['median']:.2f}x"
    if min(len(a["values"]), len(b["values"])) < 2:
        return f"unclear: one repeat ({change})"
    if a["low"] <= b["high"] and b["low"] <= a["high"]:
        return f"same within the spread ({change})"
    return f"B is {'faster' if b['median'] > a['median'] else 'SLOWER'} ({change})"


def _surroundings(a: Results, b: Results) -> Table:
    rows = [("commit", str(a["environment"]["commit"]), str(b["environment"]["commit"]))]
    rows += [
        (key, str(a["environment"][key]), str(b["environment"][key]))
        for key in _MACHINE
        if _differ(a, b, "environment", key)
    ]
    for name in a["contestants"].keys() & b["contestants"].keys():
        versions = [" ".join(f"{k} {v}" for k, v in results["contestants"][name]["versions"].items()) for results in (a, b)]
        if versions[0] != versions[1]:
            rows.append((name, *versions))
    rows += [("partial", str(a["partial"]), str(b["partial"]))] if a["partial"] or b["partial"] else []
    return Table(title="A and B", columns=("", "A", "B"), rows=tuple(rows))


def _speeds(a: Results, b: Results) -> Table:
    rows = []
    for first, second in _pairs(a, b):
        one, other = first["tokens_per_second"], second["tokens_per_second"]
        rows.append((first["contestant"], str(first["concurrency"]), _range(one), _range(other), verdict(one, other)))
    note = "tokens per second also depend on what else the machine did; speed-ups, measured within a run, show the code"
    return Table(
        title="Tokens per second", columns=("contestant", "at once", "A", "B", "verdict"), rows=tuple(rows), note=note
    )


def _speed_ups(a: Results, b: Results) -> Table:
    rows = []
    for first, second in _pairs(a, b):
        if first["contestant"] not in a["settings"]["strategies"]:
            continue
        for other in first["speed_up"].keys() & second["speed_up"].keys():
            one, two = first["speed_up"][other], second["speed_up"][other]
            name = f"{first['contestant']} / {other}"
            rows.append((name, str(first["concurrency"]), _range(one, ".2f"), _range(two, ".2f"), verdict(one, two)))
    return Table(title="Speed-up", columns=("of / over", "at once", "A", "B", "verdict"), rows=tuple(sorted(rows)))


def _pairs(a: Results, b: Results) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    other = {(record["contestant"], record["concurrency"]): record for record in b["summary"]}
    keys = [(record["contestant"], record["concurrency"]) for record in a["summary"]]
    return [(record, other[key]) for key, record in zip(keys, a["summary"], strict=True) if key in other]


def _range(spread: Mapping[str, Any], form: str = ".1f") -> str:
    return f"{number(spread['median'], form)} ({number(spread['low'], form)}–{number(spread['high'], form)})"


def _differ(a: Results, b: Results, section: str, key: str) -> bool:
    return bool(a[section].get(key) != b[section].get(key))


def _identity(request: Mapping[str, Any]) -> tuple[str, str]:
    return request["id"], request["prompt_sha256"]
