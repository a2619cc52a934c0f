"""What the demo shows, act by act."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import outrider
from benchmarks.bench.measures import Spread
from benchmarks.bench.tables import ratio
from cli.demo import side_by_side
from cli.demo.measuring import EDIT, LONG_TOKENS, OPEN, Findings
from cli.demo.on_ray import RayService
from cli.demo.recording import OURS, Pairs, Recording, differing, record

_ACTS = 4


def race(console: Console, found: Findings) -> None:
    """The same edit twice."""
    _title(console, 1, "the same edit, written twice")
    console.print(f"[bold]> {EDIT.splitlines()[0]}[/bold] (and {EDIT.count(chr(10))} lines)\n")
    plain, ours = found.edit.plain[0], found.edit.ours[0]
    side_by_side.show(console, plain, ours)
    console.print(f"Measured one after the other, {len(found.edit.ours)} times: {_speed(found.edit)} the speed.\n")


def lies(console: Console, found: Findings) -> None:
    """A hostile drafter."""
    _title(console, 2, "a drafter turns hostile")
    wrong = differing(found.edit.plain[0].result.token_ids, found.lied.result.token_ids)
    tokens = found.lied.result.usage.completion_tokens
    console.print(
        f"It sent {found.lies} drafts of random tokens, every third one no tree at all, each said to be certain.\n"
        f"[bold]{wrong} of {tokens} tokens differ[/bold]; {found.lied.seconds:.2f} s, plain decoding "
        f"{found.edit.plain[0].seconds:.2f} s.\n"
    )


def open_question(console: Console, found: Findings) -> None:
    """Where drafting brings little."""
    _title(console, 3, "a question whose answer nobody can guess")
    console.print(f"[bold]> {OPEN}[/bold]\n")
    speculative = found.open.ours[0].result.speculative_decoding
    console.print(
        f"{speculative.num_draft_tokens} tokens drafted, {speculative.num_accepted_draft_tokens} of them right: "
        f"{speculative.mean_acceptance_length:.2f} tokens per pass, {_speed(found.open)} the speed. Where drafts do not "
        "pay, none are made."
    )
    for switch in speculative.switches:
        console.print(f"  {switch}", style="dim")
    console.print()


def kill(console: Console, found: Findings, service: RayService) -> Recording:
    """The verifier that answers dies in mid-answer."""
    _title(console, 4, "two verifiers on Ray; kill -9 the one that answers")
    with console.status("Starting router, drafter and two verifiers on Ray"):
        address = service.addresses().grpc
    killed: list[int] = []
    with outrider.Client(address) as client:
        recording = record(client, OURS, OPEN, LONG_TOKENS, lambda: killed.append(service.kill_the_one_that_answers()))
    wrong = differing(found.long.result.token_ids, recording.result.token_ids)
    console.print(
        f"Process {killed[0]} was killed in mid-answer. The stream paused for {recording.longest_gap:.1f} s and went on "
        f"at the other verifier.\n[bold]{wrong} of {len(recording.result.token_ids)} tokens differ[/bold] from plain "
        "decoding in another process.\n"
    )
    return recording


def table(found: Findings, killed: Recording) -> Table:
    """All of it."""
    made = Table(title="Greedy, the default model, this machine", title_justify="left")
    for column in ("answer", "tokens", "plain passes", "passes", "x plain", "wrong"):
        made.add_column(column, justify="left" if column == "answer" else "right")
    for name, pairs in (("edit", found.edit), ("open question", found.open)):
        _row(made, name, pairs.plain[0], pairs.ours[0], _speed(pairs), pairs.differ)
    for name, plain, ours in (("hostile drafter", found.edit.plain[0], found.lied), ("verifier killed", found.long, killed)):
        _row(made, name, plain, ours, "", differing(plain.result.token_ids, ours.result.token_ids))
    return made


def _row(made: Table, name: str, plain: Recording, ours: Recording, speed: str, wrong: int) -> None:
    tokens = len(plain.result.token_ids)
    made.add_row(name, str(tokens), str(plain.passes), str(ours.passes), speed, f"[red]{wrong}[/red]" if wrong else "0")


def _speed(pairs: Pairs) -> str:
    return ratio(Spread(pairs.ratios).as_object())


def _title(console: Console, number: int, what: str) -> None:
    console.rule(f"{number} of {_ACTS}: {what}", align="left")
