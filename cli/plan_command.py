"""``outrider plan``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import settings_of
from cluster.checks.gpu_sizing import GPUS, GpuSplit, gpus_named, reasons, sentence, splits_of
from cluster.checks.preflight import model_folder
from cluster.models.drafters import draft_models, trained_config
from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.components import VerifierSettings
from cluster.settings.config import Settings, load
from services.model_files.folder import text_config
from speculation.errors import ConfigurationError


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
        _explain(settings_of(config, settings, model=model), explain, call or (), as_json)
        return
    from cli.plan_report import examined_here, plan_object, print_examined
    from cluster.checks.offered import in_manifests, read_offer
    from cluster.checks.pods import preflight_in_pods

    if gpus is not None:
        _print_sizes(settings_of(config, settings, model=model), gpus, pods or manifests, as_json)
        return
    over, offer = None, None
    if manifests is not None:
        _alone(config, pods)
        over, offer = in_manifests(_read(manifests), str(manifests))
    elif pods is not None:
        offer = read_offer(_yaml(pods), str(pods))
    if offer is None:
        examined = examined_here(settings_of(config, settings, model=model))
    else:
        copy = None if model is None else _folder(model)
        examined = preflight_in_pods(load(config, settings or (), over=over), offer, copy)
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
        splits, count, kind = split(settings, gpus)
        print(sentence(splits[0], count, kind))
        for line in reasons(splits, kind):
            print(line)
        if settings.verifier.dtype == "float32":
            print("note: this is in float32, the default; with --set verifier.dtype=bfloat16 it takes half the bytes")


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
    from services.yaml_text import read_yaml

    try:
        return read_yaml(_read(file))
    except ValueError as error:
        raise ConfigurationError(f"not YAML ({error})", field=file) from error


def split(settings: Settings, gpus: str) -> tuple[list[GpuSplit], int, str]:
    """How the model is split over the GPUs that ``gpus`` names, the way that is taken first; their number and kind.

    Stages and ranks are chosen, unless the settings say them.

    Raises:
        ConfigurationError: the model is not here, or does not fit; says what would.
    """
    count, kind = gpus_named(gpus)
    folder = model_folder(settings)
    if folder is None:
        raise ConfigurationError(
            "--gpus reads config.json, so name a folder that is here "
            "(`hf download NAME config.json --local-dir FOLDER` fetches it alone)",
            field="model",
            value=settings.model,
        )
    verifier = settings.verifier
    # One of each, the default, asks for nothing.
    replicas = None if verifier.fewest == 1 else verifier.fewest
    _check_product(gpus, count, verifier, replicas)
    # torch is loaded here, not for other plans.
    from services.verifier.loading.model_size import shape_of

    model = ResolvedModel(name=settings.model, path=folder)
    ours = {} if verifier.tensor_parallel_size == 1 else {"attention_backend": "triton"}
    on_gpu = settings.model_copy(update={"verifier": verifier.model_copy(update={"device": "cuda", **ours})})
    config = component_configs.verifier_config(on_gpu, model).target
    trained = trained_config(settings)
    beside = settings.drafter.models_in != "drafter" and trained.device != "cpu"
    drafters = sum(each.bytes_in(trained.dtype) for each in draft_models(settings, model).values()) if beside else 0
    sizes = text_config(component_configs.read_model_config(folder))
    return splits_of(config, shape_of(config), GPUS[kind], count, sizes, drafters, replicas), count, kind


def _check_product(gpus: str, count: int, verifier: VerifierSettings, replicas: int | None) -> None:
    """Check that what the settings say of replicas, ranks and stages uses all GPUs.

    Raises:
        ConfigurationError: it does not.
    """
    each, left = divmod(count, replicas or 1)
    if left:
        raise ConfigurationError(
            f"with --gpus {gpus} it must divide {count}, or be 1 to have it chosen",
            field="verifier.replicas",
            value=replicas,
        )
    fits = count % verifier.processes == 0 if replicas is None else verifier.processes in (1, each)
    if not fits:
        rule = f"divide {count}" if replicas is None else f"be {each}"
        raise ConfigurationError(
            f"with --gpus {gpus}, times tensor_parallel_size it must {rule}, or both be 1 to have them chosen",
            field="verifier.stages",
            value=verifier.stages,
        )


def sizes_object(settings: Settings, gpus: str) -> dict[str, Any]:
    """The plan for other programs: bytes and seconds."""
    splits, count, kind = split(settings, gpus)
    best = splits[0]
    found = {"replicas": best.replicas, "ranks": best.ranks, "stages": best.stages, **asdict(best.plan)}
    return {"model": settings.model, "gpus": count, "kind": kind, **found, "splits": [asdict(each) for each in splits]}
