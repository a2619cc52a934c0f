"""``outrider bench autoscale`` and ``outrider bench fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.bench_options import check_new_folder, make_folder, read_numbers
from speculation.errors import ConfigurationError

Costs = Annotated[
    str,
    typer.Option(help="What a pass costs: 8b-h100, 8b-h100-vllm, 24b-h100, 70b-h100, 135m-cpu, or a verifier's cost table."),
]
# GPUs of a fleet, or verifiers.
_MOST = 4096
Price = Annotated[float, typer.Option(min=0, help="Dollars for a GPU and hour.")]


def autoscale(
    costs: Costs = "24b-h100",
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Conversations that begin each second, on average. Default: 2.3.")
    ] = None,
    days: Annotated[float | None, typer.Option(min=0.01, max=7, help="Length of the drawn traffic. Default: 1.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            "--arrivals",
            help="Recorded traffic instead of drawn: .csv of TIMESTAMP, ContextTokens, GeneratedTokens, as Azure's traces; "
            "or jsonl of at_s, prompt_tokens, answer_tokens, conversation.",
        ),
    ] = None,
    least: Annotated[int, typer.Option("--min", min=1, help="As verifier.autoscaling.min_replicas.")] = 2,
    most: Annotated[int, typer.Option("--max", min=1, help="As verifier.autoscaling.max_replicas.")] = 8,
    fixed: Annotated[
        str | None, typer.Option(help="Sizes of fixed fleets, comma-separated. Default: around the autoscaled one's.")
    ] = None,
    price: Price = 3.0,
    cold_start: Annotated[float, typer.Option(min=0, help="Seconds from asking for a node to its first request.")] = 300.0,
    deaths: Annotated[int, typer.Option(min=0, help="Verifiers that die in the course of it.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same day.")] = 1,
    out: Annotated[Path | None, typer.Option(help="New folder for results.json, report.html and plots.")] = None,
) -> None:
    """Simulate a day of traffic: what does a fleet that follows the load cost, and who waits, against fixed fleets?

    The decisions are the service's own; machines and clock are simulated. Exit code 1: the autoscaled fleet lost an answer.
    """
    from benchmarks.bench.plots import check_installed
    from benchmarks.bench.tables import render
    from benchmarks.fleet.autoscale import AutoscaleConfig, compare_fleets
    from benchmarks.fleet.cost_tables import hardware_of
    from benchmarks.fleet.report import tables_of, write_fleet_report
    from benchmarks.fleet.simulation import FleetConfig
    from benchmarks.fleet.traffic import TrafficConfig
    from cluster.process.terminal import stderr, stdout
    from cluster.settings.placement import Autoscaling

    if least > most:
        raise ConfigurationError(field="--min", value=least, allowed=f"at most --max, {most}")
    for option, given in (("--rate", rate), ("--days", days)):
        if trace is not None and given is not None:
            raise ConfigurationError("a recording has its own", field=option, value=given, given=f"but --trace is {trace}")
    if out is not None:
        check_installed()
        check_new_folder(out)
    config = AutoscaleConfig(
        hardware=hardware_of(costs),
        traffic=TrafficConfig(per_s=2.3 if rate is None else rate, days=1.0 if days is None else days),
        recorded=trace,
        bounds=Autoscaling(min_replicas=least, max_replicas=most),
        fixed=() if fixed is None else read_numbers("--fixed", fixed, _MOST),
        price=price,
        seed=seed,
        # Nodes take some three fifths of a start: asked for, booted, image fetched.
        fleet=FleetConfig(node_s=0.6 * cold_start, load_s=0.4 * cold_start, deaths=deaths),
    )
    compared = compare_fleets(config, told=lambda name: stderr().print(f"Simulating: {name}"))
    for table in tables_of(compared):
        stdout().print(render(table))
    if out is not None:
        make_folder(out)
        write_fleet_report(compared, out)
        stdout().print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if compared.outcomes[0].lost:
        raise typer.Exit(1)


def fleet(
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, comma-separated.")] = "8,64,512",
    costs: Costs = "24b-h100",
    price: Price = 3.0,
    components: Annotated[
        Path | None, typer.Option(help="What python -m lab.component_cost printed. Default: what was measured here.")
    ] = None,
) -> None:
    """Plan fleets: what runs beside so many GPUs, how full it is, what is full first, and what one GPU more brings."""
    from benchmarks.bench.tables import render
    from benchmarks.fleet.cost_tables import hardware_of
    from benchmarks.fleet.plan import MEASURED, plan_fleet, plan_tables, read_component_costs
    from cluster.process.terminal import stdout

    hardware, measured = hardware_of(costs), read_component_costs(components or MEASURED)
    plans = [
        (plan_fleet(count, hardware, measured), plan_fleet(count + hardware.gpus, hardware, measured))
        for count in read_numbers("--gpus", gpus, _MOST)
    ]
    for table in plan_tables(plans, hardware, price):
        stdout().print(render(table))
    stdout().print(f"the other components, per request, piece, draft and replica: measured on {measured.machine}")
