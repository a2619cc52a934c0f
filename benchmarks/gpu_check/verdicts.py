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


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuGate:
    """A gate: what it asks, what it does, and how many seconds must be left for it to begin."""

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
    gates: list[GpuGate], limit_s: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> dict[str, GateVerdict]:
    """Run the gates one after the other. One that raises has failed; one for which too little time is left is not run."""
    start = clock()
    verdicts: dict[str, GateVerdict] = {}
    for gate in gates:
        left = limit_s - (clock() - start)
        if left < gate.seconds:
            found = f"{left:.0f} s are left, it may take {gate.seconds:.0f}"
            verdict = GateVerdict(result="not run", found=found, follows=f"run it alone: --only {gate.name}")
        else:
            began = clock()
            try:
                verdict = gate.run()
            except Exception as error:
                trace = "".join(traceback.format_exception(error)).splitlines()[-12:]
                verdict = GateVerdict(
                    result="fail", found=f"it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                    follows="repair this first; the trace is in the JSON file", figures={"trace": trace},
                )  # fmt: skip
            say(f"{gate.name} {verdict.result} ({clock() - began:.0f} s): {verdict.found}")
        verdicts[gate.name] = verdict
    return verdicts


def as_object(about: Mapping[str, Any], verdicts: Mapping[str, GateVerdict]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {"about": dict(about), "gates": {name: asdict(verdict) for name, verdict in verdicts.items()}}


def page(
    about: Mapping[str, Any],
    gates: list[GpuGate],
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
