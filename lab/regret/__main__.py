"""How much slower ``auto`` is than the best fixed strategy of each answer, on recorded answers and simulated machines.

    python -m lab.regret record --prompts spec_bench.jsonl humaneval.jsonl --out answers.jsonl
    python -m lab.regret compare answers.jsonl [--users 1 4 16 64] [--day 1000]

`record` lets the target answer by plain decoding, and keeps the 8 tokens that it found likeliest at each position. `compare`
runs the real decoding loop, budget and text sources over the answers, one at a time, with a clock that says what passes and
drafts take on the machine: the result is the same wherever it runs. What the target would find likely after a draft that it
rejects was not recorded; what it found likely after the same two tokens elsewhere stands for it.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.bench.tables import render
from cluster.process.terminal import stderr, stdout
from lab.regret.answer_recorder import record
from lab.regret.days import day, day_table
from lab.regret.recorded_answers import RecordedAnswer, read_answers, write_answers
from lab.regret.report import FIXED, MACHINES, PLAIN, compare, load_table, over_plain_at, regret_table
from speculation.errors import ConfigurationError


async def _record(arguments: argparse.Namespace) -> None:
    answers: list[RecordedAnswer] = []
    console = stderr()
    chosen = arguments.per_task, arguments.longest, arguments.tokens, arguments.temperatures, arguments.set or ()
    async for answer in record(arguments.prompts, *chosen):
        answers.append(answer)
        console.print(f"{len(answers)}: {answer.task}, {len(answer.output_ids)} tokens")
        # Each time, so that a run that is stopped leaves what it has.
        write_answers(arguments.out, answers)


def _compare(arguments: argparse.Namespace) -> None:
    answers, console = read_answers(arguments.answers), stdout()
    for temperature in dict.fromkeys(answer.temperature for answer in answers):
        # The same prompt may have been asked twice.
        own = list({each.prompt_ids: each for each in answers if each.temperature == temperature}.values())
        console.print(f"temperature {temperature:g}, {len(own)} answers")
        fixed = dict.fromkeys((PLAIN, *arguments.strategies))
        found = {name: compare(MACHINES[name], own, tuple(fixed), arguments.effort) for name in arguments.machines}
        console.print(render(regret_table(found)))
        if arguments.day:
            days = {name: day(each, arguments.day, arguments.replayed) for name, each in found.items()}
            console.print(render(day_table(days)))
        if arguments.users:
            wanted = [(name, users) for name in arguments.machines for users in arguments.users]
            loads = {(name, users): over_plain_at(MACHINES[name], own, users) for name, users in wanted}
            console.print(render(load_table(loads)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.regret", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_subparsers(required=True)
    recording = does.add_parser("record", help="record answers of the target")
    recording.add_argument("--prompts", nargs="+", required=True, help="files of Spec-Bench, HumanEval, or plain text")
    recording.add_argument("--out", type=Path, required=True, help="file for the answers, a line of JSON for each")
    recording.add_argument("--per-task", type=int, default=6, help="prompts of each task")
    recording.add_argument("--longest", type=int, default=700, help="most tokens of a prompt; longer ones are left out")
    recording.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    recording.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="one answer at each")
    recording.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the server")
    recording.set_defaults(do=lambda arguments: asyncio.run(_record(arguments)))
    comparing = does.add_parser("compare", help="hold auto against fixed strategies")
    comparing.add_argument("answers", type=Path, help="file that record wrote")
    comparing.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), help="default: all")
    comparing.add_argument("--strategies", nargs="+", choices=FIXED, default=list(FIXED), help="default: all")
    comparing.add_argument("--users", type=int, nargs="+", help="also auto against plain decoding, for so many at once")
    comparing.add_argument("--effort", choices=["paper", "measured"], help="of all strategies; default: their own")
    comparing.add_argument("--day", type=int, help="also a router that learns what to choose, over so many answers")
    comparing.add_argument("--replayed", type=float, default=0.1, help="share of the day's answers that it has replayed")
    comparing.set_defaults(do=_compare)
    arguments = parser.parse_args()
    try:
        arguments.do(arguments)
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
