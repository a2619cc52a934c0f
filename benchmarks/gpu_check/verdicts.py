"""What a gate found, and the page of all of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# A gate that could not be run for want of time has no result, nor has one whose figure nothing has measured.
Result = Literal["pass", "fail", "not run", "not measured"]
# Rows of a table: its head first.
Table = list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateVerdict:
    """The result of one gate.

    Attributes:
        found: one sentence.
        follows: what to do now.
        figures: for the JSON file.
        table: for the page.
    """

    result: Result
    found: str
    follows: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    table: Table = field(default_factory=list)


def judge_rows(wrong: Sequence[str], compared: int, *, differ: str, same: str, look: str, follows: str) -> GateVerdict:
    """The verdict on compared rows, of which those in ``wrong`` have other bits.

    Args:
        differ, same: what is said of rows behind their number, "3 of 9 rows" or "9 rows".
        look: what to do if some differ; ``follows``: what follows if none does.
    """
    return GateVerdict(
        result="fail" if wrong else "pass",
        found=f"{len(wrong)} of {compared} rows {differ}, first: {wrong[0]}" if wrong else f"{compared} rows {same}",
        follows=look if wrong else follows,
        figures={"compared": compared, "differ": list(wrong[:200])},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuGate:
    """A gate: what it asks, what it does, and how many seconds must be left for it to begin; it may then take longer."""

    name: str
    asks: str
    run: Callable[[], GateVerdict]
    seconds: float


def gates_named(gates: Sequence[GpuGate], only: str | None) -> list[GpuGate]:
    """Those of the names in ``only``, comma-separated; None or empty: all.

    Raises:
        ValueError: there is no such gate; names it and those that there are.
    """
    if not only:
        return list(gates)
    wanted, names = only.split(","), [gate.name for gate in gates]
    if unknown := sorted(set(wanted) - set(names)):
        raise ValueError(f"--only names {', '.join(unknown)}: there are {', '.join(names)}")
    return [gate for gate in gates if gate.name in wanted]


def run_gates(
    gates: Sequence[GpuGate],
    limit_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    *,
    keep: Callable[[Mapping[str, GateVerdict]], None] = lambda verdicts: None,
    works: Callable[[], bool] = lambda: True,
) -> dict[str, GateVerdict]:
    """Run the gates one after the other. One that raises has failed; one for which too little time is left is not run.

    Args:
        keep: called before the first and after each one, with the verdicts of all.
        works: asked after one that raised; if not, none that follows is run.
    """
    start = clock()
    verdicts = {gate.name: _not_run(gate, "it was not reached") for gate in gates}
    keep(verdicts)
    broken = ""
    for gate in gates:
        left = limit_s - (clock() - start)
        if broken:
            verdicts[gate.name] = _not_run(gate, broken)
        elif left < gate.seconds:
            verdicts[gate.name] = _not_run(gate, f"{left:.0f} s are left, it may take {gate.seconds:.0f}")
        else:
            began = clock()
            try:
                verdicts[gate.name] = gate.run()
            except Exception as error:
                verdicts[gate.name] = _raised(error)
                broken = "" if works() else f"since an error in {gate.name} nothing more runs on the GPU in this process"
            say(f"{gate.name} {verdicts[gate.name].result} ({clock() - began:.0f} s): {verdicts[gate.name].found}")
        keep(verdicts)
    return verdicts


def _not_run(gate: GpuGate, found: str) -> GateVerdict:
    return GateVerdict(result="not run", found=found, follows=f"run it alone: --only {gate.name}")


def _raised(error: Exception) -> GateVerdict:
    trace = "".join(traceback.format_exception(error)).splitlines()[-12:]
    return GateVerdict(
        result="fail", found=f"it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        follows="repair this first; the trace is in the JSON file", figures={"trace": trace},
    )  # fmt: skip


def as_object(about: Mapping[str, Any], verdicts: Mapping[str, GateVerdict]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {"about": dict(about), "gates": {name: asdict(verdict) for name, verdict in verdicts.items()}}


def page(
    about: Mapping[str, Any],
    gates: Sequence[GpuGate],
    verdicts: Mapping[str, GateVerdict],
    title: str = "What this GPU does",
) -> str:
    """One page of Markdown."""
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| gate | asks | result | found | what follows |", "|---|---|---|---|---|"]
    lines += [
        f"| {gate.name} | {gate.asks} | **{verdicts[gate.name].result}** | {_cell(verdicts[gate.name].found)} "
        f"| {_cell(verdicts[gate.name].follows)} |"
        for gate in gates
    ]
    for gate in gates:
        if table := verdicts[gate.name].table:
            lines += ["", f"## {gate.name}: {gate.asks}", "", f"| {' | '.join(table[0])} |", "|---" * len(table[0]) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in table[1:]]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
