"""The chaos matrix: every fault of every component, at the beginning, in the middle and at the end of streams, with users
watching::

    python -m tests.chaos.matrix --out FOLDER        # all of it: a line for each cell, and a record of what users saw
    python -m tests.chaos.matrix --out FOLDER --on-ray
    python -m tests.chaos.matrix --out FOLDER --two-nodes
    python -m tests.chaos.matrix --table FOLDER      # the records as a table
    python -m tests.chaos.matrix --replay FILE       # judge a record, and run its cell again with its seed
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

from tests.chaos import history
from tests.chaos.cells import ALL, ALL_BETWEEN_NODES, ALL_ON_RAY, Cell, Plan, plain_answers, shuffled
from tests.chaos.history import Record
from tests.chaos.in_processes import InProcesses, arranged
from tests.chaos.outcomes import Outcome, table
from tests.chaos.ray_service import OnRay, arranged_on_ray
from tests.chaos.two_nodes import NoNamespaces, TwoNodes, arranged_on_two_nodes, two_namespaces
from tests.chaos.users import Arrangement, run_plan

_CELLS = {InProcesses.place: ALL, OnRay.place: ALL_ON_RAY, TwoNodes.place: ALL_BETWEEN_NODES}
HEAD = "| component | fault | moment | beside | right | ended in an error | longest pause | new request answered |\n|---|---|---|---|---|---|---|---|"


def line(cell: Cell, outcome: Outcome) -> str:
    """An outcome as a line of a table."""
    kept = "yes" if outcome.right else "; ".join(outcome.broken)
    times = f"{outcome.pause_s:.1f} s | {outcome.recovery_s:.1f} s"
    where = f"| {cell.component} | {cell.fault} | {cell.moment} | {cell.beside} "
    return f"{where}| {kept} | {outcome.failed} of {outcome.streams} | {times} |"


async def run_all(model: Path, place: str, cells: Sequence[Cell], seed: int, out: Path) -> bool:
    """Run cells one after the other, and keep their records; whether all were right."""
    expected = await plain_answers(model)
    print(f"seed {seed}, {len(cells)} cells, {len(expected)} streams each\n{HEAD}", flush=True)
    right = True
    async with opened(place, model, seed) as arrangement:
        for number, cell in enumerate(cells):
            record = await run_plan(arrangement, Plan.drawn(cell, place, seed), expected)
            record.save(out / f"{number:03d} {cell}.jsonl")
            outcome = Outcome.of(record)
            right &= outcome.right
            print(line(cell, outcome), flush=True)
    return right


async def replay(found: Record, arrangement: Arrangement, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Judge a record, and run its plan again; whether both were right."""
    recorded, again = Outcome.of(found), Outcome.of(await run_plan(arrangement, found.plan, expected))
    print(f"{found.plan}\n{HEAD}\n{line(found.plan.cell, recorded)}\n{line(found.plan.cell, again)}")
    return recorded.right and again.right


async def _replay(model: Path, found: Record) -> bool:
    expected = await plain_answers(model)
    async with opened(found.plan.place, model, found.plan.seed) as arrangement:
        return await replay(found, arrangement, expected)


def opened(place: str, model: Path, seed: int) -> AbstractAsyncContextManager[Arrangement]:
    """The arrangement of that name, running during the block."""
    if place == TwoNodes.place:
        return arranged_on_two_nodes(model)
    return arranged_on_ray(model) if place == OnRay.place else arranged(model, seed)


@contextmanager
def _network(place: str) -> Iterator[None]:
    """What the arrangement of that name needs of the machine's network during the block."""
    if place != TwoNodes.place:
        yield
        return
    try:
        with two_namespaces():
            yield
    except NoNamespaces as error:
        print(
            f"skipped: no network namespaces can be made here ({error}); it takes root, iproute2 and a kernel that has them"
        )


def main() -> None:
    """Do what the command line says; exit code 1 if a promise was broken."""
    from tests.tiny_models.tiny import make_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="run cells, and write their records to this folder")
    what.add_argument("--table", type=Path, help="print the records in this folder as a table")
    what.add_argument("--replay", type=Path, help="judge this record, and run its cell again")
    parser.add_argument("--seed", type=int, default=0, help="order of the cells, moments, victims and jitter")
    parser.add_argument("--only", default="", help="cells whose names this pattern finds, such as 'verifier killed|stage'")
    parser.add_argument(
        "--on-ray", action="store_true", help="the service on a local Ray instead of a process for each component"
    )
    parser.add_argument(
        "--two-nodes", action="store_true", help="the service on a Ray of two nodes, in two network namespaces (root)"
    )
    given = parser.parse_args()
    if given.table is not None:
        print(table(map(history.read, sorted(given.table.glob("*.jsonl")))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder))
        if given.replay is not None:
            found = history.read(given.replay)
            with _network(found.plan.place):
                raise SystemExit(0 if asyncio.run(_replay(model, found)) else 1)
        given.out.mkdir(parents=True, exist_ok=True)
        place = TwoNodes.place if given.two_nodes else OnRay.place if given.on_ray else InProcesses.place
        cells = [cell for cell in shuffled(_CELLS[place], given.seed) if re.search(given.only, str(cell))]
        with _network(place):
            raise SystemExit(0 if asyncio.run(run_all(model, place, cells, given.seed, given.out)) else 1)


if __name__ == "__main__":
    main()
