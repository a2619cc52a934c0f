"""``auto`` against fixed strategies on recorded answers: regret of each answer, and time at several loads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench.tables import Table
from lab.regret.recorded_answers import RecordedAnswer
from lab.regret.simulated_clock import run
from lab.regret.simulated_service import Machine, SimulatedService
from speculation.sources import AUTO
from speculation.types import Effort

PLAIN = "autoregressive"
FIXED = (PLAIN, "prompt_lookup", "suffix", "recycling")

# Made up, but each like one that was seen: a device on which rows are nearly free, cores for the target alone, and cores
# that target and drafter share.
MACHINES = {
    "device": Machine(row=0.004, free_rows=8, draft_s=0.001),
    "own cores": Machine(draft_s=0.001),
    "shared cores": Machine(draft_s=0.004, slower=0.2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrets:
    """What came out on one machine.

    Attributes:
        answers: that were given, in this order, one at a time.
        slowness: by strategy, of each answer: its time over that of as many passes with one row.
    """

    answers: Sequence[RecordedAnswer]
    slowness: dict[str, list[float]]

    def each(self) -> list[float]:
        """By how much longer each answer takes with ``auto`` than with its best fixed strategy, as a share."""
        fixed = [found for strategy, found in self.slowness.items() if strategy != AUTO]
        return [own / min(several) - 1 for own, several in zip(self.slowness[AUTO], zip(*fixed, strict=True), strict=True)]

    def against_one(self, which: Sequence[int] | None = None) -> float:
        """By how much longer ``auto`` takes for these answers (by number; None: all) than the one strategy best for them."""
        return self.in_all(AUTO, which) / min(self.in_all(name, which) for name in self.slowness if name != AUTO) - 1

    def over_plain(self) -> list[float]:
        """Of each answer, its time with ``auto`` over that of plain decoding."""
        return [own / plain for own, plain in zip(self.slowness[AUTO], self.slowness[PLAIN], strict=True)]

    def in_all(self, strategy: str, which: Sequence[int] | None = None) -> float:
        """Time of these answers (by number; None: all) over that of as many passes with one row."""
        own = range(len(self.answers)) if which is None else which
        lengths = [len(self.answers[number].output_ids) for number in own]
        slowness = [self.slowness[strategy][number] for number in own]
        return sum(length * each for length, each in zip(lengths, slowness, strict=True)) / sum(lengths)


def _service(machine: Machine, answers: Sequence[RecordedAnswer]) -> SimulatedService:
    largest = max(max(max(each.prompt_ids), *map(max, each.top_ids), max(each.output_ids)) for each in answers)
    return SimulatedService(machine, answers, vocab_size=1 + largest)


def compare(
    machine: Machine, answers: Sequence[RecordedAnswer], fixed: Sequence[str] = FIXED, effort: Effort | None = None
) -> Regrets:
    """Give all answers under each strategy, one after the other, each strategy on a new server.

    Args:
        answers: of one temperature, no two to the same prompt.
        fixed: the strategies that ``auto`` is held against; ``PLAIN`` must be one.
        effort: of them all; None: each has its usual one.
    """

    async def slowness(strategy: str) -> list[float]:
        service = _service(machine, answers)
        await service.loop.start()
        found = [
            await service.seconds([each], strategy, effort) / (len(each.output_ids) * machine.pass_s) for each in answers
        ]
        await service.loop.stop()
        return found

    return Regrets(answers=answers, slowness={strategy: run(slowness(strategy)) for strategy in (*fixed, AUTO)})


def over_plain_at(
    machine: Machine, answers: Sequence[RecordedAnswer], users: int, rounds: int = 2
) -> list[tuple[float, float]]:
    """Time with ``auto`` over that with plain decoding, by round of ``users`` answers at once.

    Returns for each round: of an answer on average, and until the last answer ends. The last one is mostly one for which
    drafts bring nothing: it pays for the rows of the others, and is the only one left when they have ended.
    """

    async def times(strategy: str) -> list[list[float]]:
        service = _service(machine, answers)
        await service.loop.start()
        found = []
        for number in range(rounds):
            batch = [answers[(number * users + each) % len(answers)] for each in range(users)]
            found.append(await service.times(batch, strategy))
        await service.loop.stop()
        return found

    rounds_of = zip(run(times(AUTO)), run(times(PLAIN)), strict=True)
    return [(statistics.mean(own) / statistics.mean(plain), max(own) / max(plain)) for own, plain in rounds_of]


def regret_table(found: dict[str, Regrets]) -> Table:
    """Time of every strategy, and regret, by machine and task.

    Regret is held against one strategy, the best for the task's answers, and against the best of each answer.
    """
    strategies = list(next(iter(found.values())).slowness)
    rows = []
    for name, regrets in found.items():
        each, over = regrets.each(), regrets.over_plain()
        times = (f"{regrets.in_all(strategy):.3f}" for strategy in strategies)
        rows.append((name, "all", *times, f"{regrets.against_one():.1%}", *_summary(each), f"{max(over):.2f}"))
        for task in dict.fromkeys(answer.task for answer in regrets.answers):
            own = [number for number, answer in enumerate(regrets.answers) if answer.task == task]
            times = (f"{regrets.in_all(strategy, own):.3f}" for strategy in strategies)
            ours, worst = _summary([each[i] for i in own]), f"{max(over[i] for i in own):.2f}"
            rows.append((name, task, *times, f"{regrets.against_one(own):.1%}", *ours, worst))
    regret = ("against one", "of each, mean", "worst", "over 5 %")
    columns = ("machine", "task", *strategies, *regret, f"worst of {PLAIN}")
    return Table(title="Time over that of plain passes, and regret of auto", columns=columns, rows=tuple(rows))


def _summary(regrets: Sequence[float]) -> tuple[str, str, str]:
    many = sum(regret > 0.05 for regret in regrets)
    return f"{statistics.mean(regrets):.1%}", f"{max(regrets):.1%}", f"{many} of {len(regrets)}"


def load_table(found: dict[tuple[str, int], list[tuple[float, float]]]) -> Table:
    """What ``over_plain_at`` found, by machine and users at once."""
    rows = tuple(
        (name, str(users), *(f"{each:.3f}" for ratios in found[name, users] for each in ratios)) for name, users in found
    )
    rounds = range(1, 1 + len(next(iter(found.values()))))
    columns = [column for number in rounds for column in (f"round {number}: mean", f"round {number}: last")]
    return Table(title="Time of an answer, auto over plain decoding", columns=("machine", "users", *columns), rows=rows)
