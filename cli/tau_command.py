"""``outrider train tau``: tokens per pass of drafters side by side, each alone, on text that the target has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from cli.train_run_commands import Data, Model, tree_sizes, writer_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from services.drafter.heads.files.kinds import Checkpoint
    from services.drafter.sources.interfaces import ModelSource
    from training.data_manifest import DataManifest

# By domain: of greedy text and of sampled text, tokens per pass by size of the trees.
_Taus = Mapping[str, tuple[dict[int, float], dict[int, float]]]


def tau(
    data: Data,
    drafters: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of drafters, of any layout that is served. Default: those that come along."),
    ] = None,
    model: Model = None,
    trees: Annotated[str, typer.Option(help="Most nodes of the trees, comma-separated.")] = "8,16,31,60",
    answers: Annotated[
        Literal["held-out", "all"],
        typer.Option(help="all: where the drafters have learnt from none of the data."),
    ] = "held-out",
    most: Annotated[int, typer.Option("--most", min=1, help="Answers of each domain, greedy and sampled each.")] = 8,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as drafter.device=cuda. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare drafters by the tokens that the target would take from their trees, alone and in every pass.

    The target does not run: it would have written the same text whatever was drafted. Sampled text is drafted for without
    the requests' noise, which the data do not hold; a server's drafters know it, and do better there. A domain is a file of
    prompts (see outrider train data); passes over prompts are not counted.
    """
    from cluster.models.drafters import draft_models
    from cluster.models.target import resolve
    from cluster.settings.component_configs import drafter_config
    from cluster.settings.config import load
    from services.drafter.sources.catalogue import make_source
    from training.data_folder import weights_digest
    from training.evaluate import tree_taus
    from training.shards import read_shards

    flags = [*(settings or []), f"model={model or writer_of(data)}", "drafter.models_in=drafter"]
    if drafters:
        # One after the other: several may be of one kind.
        named = [[*flags, f"drafter.models=[{json.dumps(str(folder.expanduser().resolve()))}]"] for folder in drafters]
    else:
        named = [flags]
    sizes = tree_sizes(trees)
    if not sizes:
        raise ConfigurationError(field="--trees", value=f"{trees!r}", allowed="whole numbers, such as 8,16")
    shards = read_shards(data, "validation" if answers == "held-out" else None)
    sequences = list(shards)
    if not any(len(each.tokens) - each.prompt_length >= 2 for each in sequences):
        raise ConfigurationError(
            "no such answer has two tokens; outrider train data makes more", field="--data", verb="", value=data
        )
    target_settings = load(flags=flags)
    target = resolve(target_settings.model, target_settings.cache_dir, say=stderr().print)
    _check_target(data, shards.manifest, target, weights_digest(target.path))
    found: dict[str, _Taus] = {}
    for own in named:
        loaded = load(flags=own)
        checkpoints = draft_models(loaded, target)
        if not checkpoints:
            raise ConfigurationError(f"no drafter comes along for {target.name}: name folders")
        config = drafter_config(loaded, target)
        for name, checkpoint in checkpoints.items():
            if lacking := _lacking_states(data, shards.manifest.layers, checkpoint):
                if drafters:
                    raise ConfigurationError(lacking)
                stderr().print(f"left out: {lacking}", markup=False, soft_wrap=True)
                continue
            with stderr().status(f"drafting with {checkpoint.folder}"):
                source = cast("ModelSource", make_source(name, config))
                found[str(checkpoint.folder)] = tree_taus(source, sequences, sizes, most, shards.manifest.layers)
    if as_json:
        typer.echo(json.dumps(_as_json(found)))
        return
    for domain in dict.fromkeys(domain for each in found.values() for domain in each):
        stdout().print(_table(domain, found, sizes))


def _check_target(data: Path, manifest: DataManifest, target: ResolvedModel, digest: str) -> None:
    if digest != manifest.target.weights_sha256:
        raise ConfigurationError(
            (
                f"made by {manifest.target.name} ({manifest.target.weights_sha256[:12]}), not by {target.name} "
                f"({digest[:12]}): name that model with --model"
            ),
            field="--data",
            verb="",
            value=data,
        )


def _lacking_states(data: Path, held: Sequence[int], checkpoint: Checkpoint) -> str | None:
    """Why a drafter cannot draft from these data, if it cannot."""
    lacking = [layer for layer in checkpoint.layers if layer not in held]
    if not lacking:
        return None
    wanted = ",".join(map(str, sorted({*held, *checkpoint.layers})))
    return (
        f"{checkpoint.folder} reads the states of layer {lacking[0]}, but the data at {data} hold the layers "
        f"{', '.join(map(str, held))}: make data with `outrider train data --layers {wanted}`"
    )


def _as_json(found: Mapping[str, _Taus]) -> dict[str, Any]:
    def rounded(taus: Mapping[int, float]) -> dict[str, float]:
        return {str(size): round(tau, 4) for size, tau in taus.items()}

    return {
        folder: {domain: {"greedy": rounded(greedy), "sampled": rounded(drawn)} for domain, (greedy, drawn) in taus.items()}
        for folder, taus in found.items()
    }


def _table(domain: str, found: Mapping[str, _Taus], sizes: Sequence[int]) -> Any:
    from rich.table import Table

    table = Table(f"{domain}: tokens per pass", *(f"{size} nodes" for size in sizes))
    for folder, taus in found.items():
        for kind, by_size in zip(("greedy", "sampled"), taus.get(domain, ({}, {})), strict=True):
            if by_size:
                table.add_row(f"{Path(folder).name}, {kind} text", *(f"{by_size[size]:.2f}" for size in sizes))
    return table
