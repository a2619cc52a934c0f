"""``outrider plan``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster import build
from cluster.checks.gpu_sizing import (
    GPUS,
    GpuPlan,
    GpuSplit,
    gpus_named,
    sentence,
    size_up,
    split_sentence,
    splits_of,
)
from cluster.checks.preflight import model_folder
from cluster.models.drafters import draft_models, trained_config
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings, load
from services.model_files.folder import text_config
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.verifier.config import TargetConfig
    from services.verifier.loading.memory import Shape


def plan(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Hugging Face name, folder or .gguf file. With --pods or --manifests: a local copy."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as verifier.dtype=bfloat16. Repeatable.")
    ] = None,
    pods: Annotated[
        Path | None, typer.Option("--pods", help="The chart's pods.yaml: check against its pods instead of this machine.")
    ] = None,
    manifests: Annotated[
        Path | None,
        typer.Option("--manifests", help="Output of `helm template`, or -: check its settings against its pods."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Such as 2xH100: what the model takes of them, on paper; needs config.json only."),
    ] = None,
    explain: Annotated[
        Path | None,
        typer.Option(
            "--explain",
            metavar="REQUEST.json",
            help="A body of /v1/chat/completions or /v1/completions: print which rule of the router counts for it, and what "
            "would be done.",
        ),
    ] = None,
    call: Annotated[
        list[str] | None,
        typer.Option(
            "--call",
            help="With --explain, what else a rule may ask for, such as tenant=acme, key=batch, header.x-job=nightly, "
            "open_requests=12, time=2026-11-25T23:30+01:00. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what `outrider serve`, or the Helm chart, would run, and where. Rejects what would not start; starts nothing."""
    if explain is not None or call:
        _explain(load(config, [*(settings or ()), *([f"model={model}"] if model else [])]), explain, call or (), as_json)
        return
    from cli.plan_report import examined_here, plan_object, print_examined
    from cluster.checks.offered import in_manifests, read_offer
    from cluster.checks.pods import preflight_in_pods

    if gpus is not None:
        _print_sizes(
            load(config, [*(settings or ()), *([f"model={model}"] if model else [])]), gpus, pods or manifests, as_json
        )
        return
    over, offer = None, None
    if manifests is not None:
        _alone(config, pods)
        over, offer = in_manifests(_read(manifests), str(manifests))
    elif pods is not None:
        offer = read_offer(_yaml(pods), str(pods))
    flags = list(settings or ())
    if offer is None:
        flags += [f"model={model}"] if model is not None else []
        examined = examined_here(load(config, flags))
    else:
        copy = None if model is None else _folder(model)
        examined = preflight_in_pods(load(config, flags, over=over), offer, copy)
    if as_json:
        print(json.dumps(plan_object(examined), indent=1))
    else:
        print_examined(examined, None if offer is None else offer.storage.path)


def _explain(settings: Settings, request: Path | None, call: Sequence[str], as_json: bool) -> None:
    from cli.explained_request import explain, print_explanation

    if request is None:
        raise ConfigurationError("--call says more of the request of --explain: name that", about="--call")
    print_explanation(explain(settings, request, call), as_json=as_json)


def _print_sizes(settings: Settings, gpus: str, other: Path | None, as_json: bool) -> None:
    if other is not None:
        raise ConfigurationError("--gpus plans for GPUs alone: leave --pods and --manifests out", about="--gpus")
    if as_json:
        print(json.dumps(sizes_object(settings, gpus), indent=1))
    else:
        print(sentence(*sized(settings, gpus)))
        if more := split_sentence(split(settings, gpus)):
            print(more)


def _alone(config: Path | None, pods: Path | None) -> None:
    if config is not None or pods is not None:
        raise ConfigurationError("--manifests holds settings and pods: leave --config and --pods out", about="--manifests")


def _folder(model: str) -> Path:
    if not (Path(model) / "config.json").is_file():
        raise ConfigurationError(
            field="--model", value=model, allowed="a folder with config.json, the copy of settings.model"
        )
    return Path(model)


def _read(file: Path) -> str:
    from services.model_files.folder import reading

    if str(file) == "-":
        return sys.stdin.read()
    with reading(f"read {file}", about=file):
        return file.read_text(encoding="utf-8")


def _yaml(file: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(_read(file))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"not YAML ({' '.join(str(error).split())})", field=file) from error


def sized(settings: Settings, gpus: str) -> tuple[GpuPlan, int, str]:
    """The plan, and number and kind of the GPUs that ``gpus`` names; the layers are split over all of them.

    Raises:
        ConfigurationError: the model is not here, or does not fit; says what would.
    """
    config, shape, folder = _target_on(settings, gpus)
    count, kind = gpus_named(gpus)
    trained = trained_config(settings)
    beside = settings.drafter.models_in != "drafter" and trained.device != "cpu"
    found = draft_models(settings, ResolvedModel(name=settings.model, path=folder)).values() if beside else ()
    drafters = sum(each.bytes_in(trained.dtype) for each in found)
    return size_up(config, shape, GPUS[kind], drafters), count, kind


def split(settings: Settings, gpus: str) -> list[GpuSplit]:
    """All ways to split the model over these GPUs, the fastest first.

    Raises:
        ConfigurationError: see ``sized``.
    """
    config, shape, folder = _target_on(settings, gpus)
    count, kind = gpus_named(gpus)
    return splits_of(config, shape, GPUS[kind], count, text_config(build.read_model_config(folder)))


def _target_on(settings: Settings, gpus: str) -> tuple[TargetConfig, Shape, Path]:
    """The target with a stage on each of these GPUs, what its size depends on, and its folder."""
    count, _ = gpus_named(gpus)
    folder = model_folder(settings)
    if folder is None:
        raise ConfigurationError(
            "--gpus reads config.json, so name a folder that is here", field="model", value=settings.model
        )
    if settings.verifier.stages not in (1, count):
        raise ConfigurationError(
            f"with --gpus {gpus} it must be {count}", field="verifier.stages", value=settings.verifier.stages
        )
    # torch is loaded here, not for other plans.
    from services.verifier.loading.model_size import shape_of

    model = ResolvedModel(name=settings.model, path=folder)
    verifier = settings.verifier.model_copy(update={"device": "cuda", "stages": count})
    config = build.verifier_config(settings.model_copy(update={"verifier": verifier}), model).target
    return config, shape_of(config), folder


def sizes_object(settings: Settings, gpus: str) -> dict[str, Any]:
    """The plan for other programs: bytes and seconds."""
    found, count, kind = sized(settings, gpus)
    splits = [asdict(each) for each in split(settings, gpus)]
    return {"model": settings.model, "gpus": count, "kind": kind, **asdict(found), "splits": splits}
