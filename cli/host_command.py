"""``outrider bench host``: what a step costs beside the target's arithmetic."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

_EPILOG = """\
What runs: the real decoding loop, KV cache blocks, description of each pass, chooser, drafting messages through the codec,
and the real text drafters, all in this process. What does not: the model. Its choices come from scripted texts that repeat
themselves, so that drafters find something, and every answer is compared with its text.

How to read it: a GPU waits for the host between two passes, so "clock" is what a step would take at least however fast the
GPU is. "processors" is the time of all threads, and says most on a machine that does other work; the last line repeats it.
What only the benchmark does, which makes up what the target says, is in neither.
Times are the best of all rounds. Drafts are waited for, and every node that was drafted is checked. With --layout gpu what
is done while a pass runs is told apart from what the GPU waits for.

Examples:

outrider bench host

outrider bench host --loads 16,16x8:prompt_lookup --rounds 5

outrider bench host --layout gpu --loads 64x4:blend

outrider bench host --soak 100000 --loads 16x4:blend
"""


def host(
    loads: Annotated[
        str, typer.Option(help="Comma-separated: requests at once, or requests x nodes:strategy. 64x4:blend: 4 nodes each.")
    ] = "64,256,64x4:blend",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measured rounds of each load; the best one counts.")] = 12,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps of a round.")] = 25,
    soak: Annotated[
        int | None,
        typer.Option(
            min=100, help="Instead, run so many steps of each load, with requests that end and begin: is memory flat?"
        ),
    ] = None,
    layout: Annotated[
        Literal["described", "gpu"],
        typer.Option(
            help="described: a pass is described for a GPU, and takes no time. gpu: it is laid out in a captured graph's "
            "buffers, on a device that computes nothing and takes --pass-ms."
        ),
    ] = "described",
    pass_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="With --layout gpu, milliseconds of a pass on the device.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the host's part of a decoding step: everything but the target's arithmetic, in microseconds by phase.

    Needs no model and no GPU. The last line has the figures, milliseconds of processor time a step. Exit code 1: an answer
    was not what the target chose, or with --soak memory grew.
    """
    from benchmarks.bench.tables import render
    from benchmarks.host.loads import read_load
    from benchmarks.host.measure import measure
    from benchmarks.host.report import as_object, beside_line, beside_table, figures_line, host_tables
    from cluster.process.terminal import stderr, stdout

    wanted = [read_load(each.strip()) for each in loads.split(",")]
    if soak is not None:
        _soak([each.name for each in wanted], soak, as_json=as_json)
        return
    notes = stderr()
    with notes.status("host") as status:
        pass_s = pass_ms / 1e3 if layout == "gpu" else None
        measured = [measure(load, rounds=rounds, steps=steps, told=status.update, pass_s=pass_s) for load in wanted]
    if as_json:
        typer.echo(json.dumps(as_object(measured)))
        return
    for table in [*host_tables(measured), *([] if pass_s is None else [beside_table(measured)])]:
        stdout().print(render(table))
    line = figures_line(measured) if pass_s is None else beside_line(measured)
    stdout().print(line, highlight=False, soft_wrap=True)


def _soak(loads: list[str], passes: int, *, as_json: bool) -> None:
    from benchmarks.bench.tables import render
    from benchmarks.host.loads import read_load
    from benchmarks.host.measure import soak
    from benchmarks.host.report import memory_table, memory_verdict
    from cluster.process.terminal import stderr, stdout

    flat = True
    for name in loads:
        with stderr().status(name) as status:
            found = soak(read_load(name), passes=passes, stretches=20, told=status.update)
        own, told = memory_verdict(found)
        flat = flat and own
        if as_json:
            typer.echo(json.dumps({"load": name, "flat": own, "memory": found.memory}))
            continue
        stdout().print(render(memory_table(found)))
        stdout().print(f"{name}: {told}", highlight=False, soft_wrap=True)
    if not flat:
        raise typer.Exit(1)


EPILOG = _EPILOG.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")
