"""``outrider plan --gpus``: what a model would take of GPUs that need not be here, from its config.json alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cluster import build
from cluster.checks.gpu_sizing import GPUS, GpuPlan, gpus_named, size_up
from cluster.checks.preflight import model_folder
from cluster.models.drafters import draft_models, trained_config
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from speculation.errors import ConfigurationError


def sized(settings: Settings, gpus: str) -> tuple[GpuPlan, int, str]:
    """The plan, and number and kind of the GPUs that ``gpus`` names; the layers are split over all of them.

    Raises:
        ConfigurationError: the model is not here, or does not fit; says what would.
    """
    count, kind = gpus_named(gpus)
    folder = model_folder(settings)
    if folder is None:
        raise ConfigurationError(f"model is {settings.model}: --gpus reads config.json, so name a folder that is here")
    if settings.verifier.stages not in (1, count):
        raise ConfigurationError(f"verifier.stages is {settings.verifier.stages}: with --gpus {gpus} it must be {count}")
    # torch is loaded here, not for other plans.
    from services.verifier.loading.load_model import shape_of

    model = ResolvedModel(name=settings.model, path=folder)
    verifier = settings.verifier.model_copy(update={"device": "cuda", "stages": count})
    config = build.verifier_config(settings.model_copy(update={"verifier": verifier}), model).target
    trained = trained_config(settings)
    beside = settings.drafter.models_in != "drafter" and trained.device != "cpu"
    found = draft_models(settings, model).values() if beside else ()
    drafters = sum(each.bytes_in(trained.dtype) for each in found)
    return size_up(config, shape_of(config), GPUS[kind], drafters), count, kind


def sizes_object(settings: Settings, gpus: str) -> dict[str, Any]:
    """The plan for other programs: bytes and seconds."""
    found, count, kind = sized(settings, gpus)
    return {"model": settings.model, "gpus": count, "kind": kind, **asdict(found)}
