"""``make simulate``: many seeds, one after the other, with a report. A seed that fails is shrunk and printed as a line."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.simulation.fault_points import POINTS
from tests.simulation.planted import PLANTED
from tests.simulation.schedule import schedule_of
from tests.simulation.shrinking import Part, shrunk, whole
from tests.simulation.world import happened, undisturbed

_CLOCK, _CPU = time.perf_counter, time.process_time
# The bar moves after so many runs.
_STEP = 100
_BAR = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000_000, help="how many; 1000000 by default")
    parser.add_argument("--first", type=int, default=1, help="the first one; 1 by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many failures; 5 by default")
    parser.add_argument("--plant", choices=PLANTED, help="with a fault planted into the product, which must be found")
    given = parser.parse_args(arguments)
    planted = PLANTED[given.plant]() if given.plant else None
    if planted is None:
        return _simulate(given)
    with planted:
        return _simulate(given)


def _simulate(given: argparse.Namespace) -> int:
    counts, fired, failures, began, done, virtual_s = Counter[str](), Counter[str](), 0, _CLOCK(), 0, 0.0
    with undisturbed():
        for seed in range(given.first, given.first + given.seeds):
            result, done = happened(schedule_of(seed)), done + 1
            counts.update(result.counts)
            fired.update(result.fired)
            virtual_s += result.seconds
            if result.problems:
                failures += 1
                _tell(whole(seed), result.problems)
            took_s = _CLOCK() - began
            if done % _STEP == 0:
                _bar(done, given.seeds, failures, took_s)
            if took_s > given.seconds or failures >= given.failures:
                break
    print(f"\n{done} schedules, {virtual_s:.0f} simulated seconds, in {_CLOCK() - began:.1f} s: {failures} failed")
    print(f"{done / max(_CPU(), 0.001):.0f} schedules for a second of a core, the start included")
    print("ends of answers, and events:", ", ".join(f"{name} {count}" for name, count in counts.most_common()))
    print("fault points:", ", ".join(f"{name} {fired[name]}" for name in POINTS))
    if silent := [name for name in POINTS if not fired[name]]:
        print("never fired:", ", ".join(silent))
    return 1 if failures else 0


def _tell(part: Part, problems: Sequence[str]) -> None:
    """Print a failure, and the smallest schedule that shows it."""
    print(f"\r\033[Kseed {part.seed}: {problems[0]}", file=sys.stderr)
    small = shrunk(part, lambda less: bool(happened(less.schedule).problems))
    print(f"    {small}  # {happened(small.schedule).problems[0]}", file=sys.stderr, flush=True)


def _bar(done: int, total: int, failures: int, took_s: float) -> None:
    if not sys.stderr.isatty():
        return
    full = _BAR * done // total
    text = f"[{'#' * full}{'.' * (_BAR - full)}] {done}/{total}, {done / took_s:.0f} a second, {failures} failed"
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
