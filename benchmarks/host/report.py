"""What was measured of the host's part of a step: tables, one object, and the line of figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.bench.tables import Table
from benchmarks.host.loads import HostLoad
from benchmarks.host.measure import BesideGpu, HostCost

# What the target's thread may take between two passes of a GPU, of 64 requests with four nodes.
BESIDE_GOAL_S = 0.001
# Memory that grows by more than this between the middle and the end of a soak is not flat.
_FLAT_MIB = 8.0


def host_tables(measured: Sequence[HostCost]) -> list[Table]:
    """One of the steps, one of their phases, one of the code's parts."""
    return [
        Table(
            title="The host's part of a step, milliseconds",
            columns=("load", "processors", "clock", "goal", "tokens a step", "nodes a step", "us a token"),
            rows=tuple(_step_row(each) for each in measured),
            note="the best of all rounds; processors: time of all threads, clock: from one pass to the next; both without "
            "what only the benchmark does",
        ),
        _by_name("By phase of the loop, microseconds a step on the clock, mean of all rounds", measured, "phases"),
        _by_name("By part of the code, microseconds a step of the processors", measured, "parts"),
    ]


def beside_table(measured: Sequence[HostCost]) -> Table:
    """What the host does beside a GPU's passes."""
    return Table(
        title="Beside a GPU's captured passes, milliseconds a step",
        columns=("load", "target's thread", "goal", "the GPU waits"),
        rows=tuple(
            (
                _told(each.load), f"{1e3 * each.beside.host_s:.2f}", f"{1e3 * BESIDE_GOAL_S:.2f}",
                f"{1e3 * each.beside.idle_s:.2f}",
            )
            for each in measured
            if each.beside is not None
        ),
        note="target's thread: processor time of layout, launch, choices, verdicts and rows that are kept, without the loop "
        "between; the best of all rounds",
    )  # fmt: skip


def beside_line(measured: Sequence[HostCost]) -> str:
    """The last line of ``--layout gpu``."""
    told = [
        f"{_told(each.load)} {1e3 * each.beside.host_s:.2f} (goal {1e3 * BESIDE_GOAL_S:.1f}), the GPU waits "
        f"{1e3 * each.beside.idle_s:.2f}"
        for each in measured
        if each.beside is not None
    ]
    return f"host ms a step beside the GPU: {', '.join(told)}"


def memory_table(found: HostCost) -> Table:
    """Memory after each stretch of passes."""
    return Table(
        title=f"Memory while requests end and begin, {found.load.name}",
        columns=("passes", "MiB", "ms a step"),
        rows=tuple(
            (f"{passes}", f"{size / 2**20:.1f}", f"{1e3 * window.cpu_s:.2f}")
            for (passes, size), window in zip(found.memory, found.windows, strict=True)
        ),
    )


def memory_grown_mib(found: HostCost) -> float:
    """How much more memory there was in the last quarter of the stretches than in the second one."""
    sizes = [size / 2**20 for _, size in found.memory]
    quarter = max(1, len(sizes) // 4)
    return max(sizes[-quarter:]) - max(sizes[quarter : 2 * quarter] or sizes[:1])


def memory_verdict(found: HostCost) -> tuple[bool, str]:
    """Whether memory stays flat, and the line that says so."""
    grown = memory_grown_mib(found)
    flat = grown <= _FLAT_MIB
    passes = found.memory[-1][0]
    return flat, f"memory {'is flat' if flat else 'grows'}: {grown:+.1f} MiB over the last half of {passes} passes"


def figures_line(measured: Sequence[HostCost]) -> str:
    """The last line: every load with its milliseconds of processors a step, and its goal."""
    return "host ms a step: " + ", ".join(
        f"{_told(each.load)} {1e3 * each.best.cpu_s:.2f}{_goal(each)}" for each in measured
    )


def as_object(measured: Sequence[HostCost]) -> dict[str, Any]:
    """Plain numbers, in milliseconds a step."""
    return {
        each.load.name: {
            "requests": each.load.requests,
            "nodes": each.load.nodes,
            "strategy": each.load.strategy,
            "processors_ms": round(1e3 * each.best.cpu_s, 4),
            "clock_ms": round(1e3 * min(window.wall_s for window in each.windows), 4),
            "goal_ms": None if each.load.goal_s is None else round(1e3 * each.load.goal_s, 4),
            "tokens": each.best.tokens,
            "checked_nodes": each.best.nodes,
            "phases_ms": {name: round(1e3 * value, 4) for name, value in each.phases.items()},
            "parts_ms": {name: round(1e3 * value, 4) for name, value in each.parts.items()},
            **_beside(each.beside),
        }
        for each in measured
    }


def _beside(found: BesideGpu | None) -> dict[str, float]:
    if found is None:
        return {}
    return {"beside_gpu_ms": round(1e3 * found.host_s, 4), "gpu_waits_ms": round(1e3 * found.idle_s, 4)}


def _step_row(found: HostCost) -> tuple[str, ...]:
    best, load = found.best, found.load
    return (
        _told(load),
        f"{1e3 * best.cpu_s:.2f}",
        f"{1e3 * min(window.wall_s for window in found.windows):.2f}",
        "–" if load.goal_s is None else f"{1e3 * load.goal_s:.2f}",
        f"{best.tokens:.0f}",
        f"{best.nodes:.0f}",
        f"{1e6 * best.cpu_s / best.tokens:.1f}",
    )


def _by_name(title: str, measured: Sequence[HostCost], what: str) -> Table:
    found: list[dict[str, float]] = [getattr(each, what) for each in measured]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = tuple((name, *(f"{1e6 * each[name]:.0f}" if name in each else "–" for each in found)) for name in names)
    return Table(title=title, columns=("", *(_told(each.load) for each in measured)), rows=rows)


def _told(load: HostLoad) -> str:
    return f"{load.requests} x {load.nodes} nodes {load.strategy}" if load.nodes else f"{load.requests} plain"


def _goal(found: HostCost) -> str:
    return "" if found.load.goal_s is None else f" (goal {1e3 * found.load.goal_s:.1f})"
