"""A day of a router that learns, on recorded answers: how much longer they took than with each tenant's best strategy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks.bench.tables import Table
from lab.regret.report import PLAIN, Regrets
from services.router.learning.choice import choose
from services.router.learning.contexts import Context, context_of
from services.router.learning.counts import Counts
from services.router.rules.facts import Facts
from speculation.sources import AUTO

# A tenant that asks for everything.
MIXED = "all of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """How long a tenant's answers took.

    Attributes:
        learnt: seconds of plain passes with what the router chose.
        fixed: the same with each strategy, ``auto`` among them.
        left: answers that had another strategy than ``auto``.
        answers: how many there were.
    """

    learnt: float
    fixed: dict[str, float]
    left: int
    answers: int

    @property
    def best(self) -> str:
        """The best strategy for all of them, in hindsight."""
        return min(self.fixed, key=lambda name: self.fixed[name])

    def over(self, strategy: str) -> float:
        """By how much longer they took than with a strategy, as a share."""
        return self.learnt / self.fixed[strategy] - 1


def day(found: Regrets, answers: int, replayed: float) -> dict[str, Day]:
    """Let each task be a tenant, and one more ask for all; everybody asks again and again, in any order.

    Args:
        replayed: the share of answers that are replayed. A replay says of every strategy what it took here.
    """
    source, counts = random.Random(1), Counts()
    tasks = list(dict.fromkeys(answer.task for answer in found.answers))
    chosen: dict[str, list[tuple[int, str]]] = {tenant: [] for tenant in (*tasks, MIXED)}
    for _ in range(answers):
        tenant = source.choice(list(chosen))
        own = [number for number, answer in enumerate(found.answers) if tenant in (answer.task, MIXED)]
        number = source.choice(own)
        context = _context(found, number, tenant)
        strategy = choose(counts, context, [name for name in found.slowness if name != AUTO], open_requests=1).strategy
        chosen[tenant].append((number, strategy))
        if source.random() < replayed:
            counts.learn(context, _costs(found, number))
    return {tenant: _told(found, own) for tenant, own in chosen.items() if own}


def _context(found: Regrets, number: int, tenant: str) -> Context:
    answer = found.answers[number]
    facts = Facts(
        tenant=tenant,
        key="",
        model="",
        prompt_tokens=len(answer.prompt_ids),
        sampled=answer.temperature > 0,
        grammar=False,
        prediction=False,
        tools=False,
        open_requests=1,
        at=datetime.now(UTC),
        headers={},
        metadata={},
        system_prompt="",
    )
    return context_of(answer.prompt_ids, facts)


def _costs(found: Regrets, number: int) -> dict[str, tuple[float, float]]:
    tokens, plain = len(found.answers[number].output_ids), found.slowness[PLAIN][number]
    steps = {name: tokens * each[number] / plain for name, each in found.slowness.items()}
    return {name: (own, steps[AUTO]) for name, own in steps.items() if name != AUTO}


def _told(found: Regrets, chosen: Sequence[tuple[int, str]]) -> Day:
    def took(number: int, strategy: str) -> float:
        return len(found.answers[number].output_ids) * found.slowness[strategy][number]

    return Day(
        learnt=sum(took(number, strategy) for number, strategy in chosen),
        fixed={name: sum(took(number, name) for number, _ in chosen) for name in found.slowness},
        left=sum(strategy != AUTO for _, strategy in chosen),
        answers=len(chosen),
    )


def day_table(days: dict[str, dict[str, Day]]) -> Table:
    """What ``day`` found, by machine and tenant."""
    rows = []
    for machine, tenants in days.items():
        whole, auto = sum(one.learnt for one in tenants.values()), sum(one.fixed[AUTO] for one in tenants.values())
        best = sum(one.fixed[one.best] for one in tenants.values())
        ratios = (whole / best, auto / best, whole / auto)
        rows.append((machine, "together", "", *(f"{ratio - 1:.1%}" for ratio in ratios), ""))
        for tenant, one in tenants.items():
            regret, usual = one.over(one.best), one.fixed[AUTO] / one.fixed[one.best] - 1
            left = f"{one.left} of {one.answers}"
            rows.append((machine, tenant, one.best, f"{regret:.1%}", f"{usual:.1%}", f"{one.over(AUTO):.1%}", left))
    columns = ("machine", "tenant", "its best", "regret of learning", "regret of auto", "learning over auto", "not auto")
    return Table(title="A day of a router that learns", columns=columns, rows=tuple(rows))
