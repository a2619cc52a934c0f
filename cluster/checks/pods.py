"""Checks settings against the pods of a chart, before there are any; names the chart's values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.checks import model_files
from cluster.checks.offered import GroupOffer, Offer, amount
from cluster.checks.preflight import BUILT_IN_BYTES, check_model, check_settings, model_folder
from cluster.models.drafters import memory_here, trained_config
from cluster.models.named_models import read_models
from cluster.models.target import BUILT_IN, ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import Settings
from services.machine.processor import cache_folder
from services.model_files.weights.headers import check_weights
from speculation.errors import ConfigurationError
from speculation.sources import AUTO, STRATEGIES

_MIB = 2**20
_SNAPSHOT = "recycling_snapshot"
# Of the image's torch (k8s/images/gpu.lock), and the oldest driver by CUDA's generation that runs it (NVIDIA's table of
# minor version compatibility, CUDA's release notes).
IMAGE_CUDA = "13.0"
_OLDEST = {"12": 525, "13": 580}
OLDEST_DRIVER = _OLDEST[IMAGE_CUDA.partition(".")[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What was examined.

    Attributes:
        settings: less what lies on a volume that is not mounted here.
        folder: of the model, if it is here.
        unchecked: what was not checked, in words.
    """

    settings: Settings
    folder: Path | None
    unchecked: tuple[str, ...]


def preflight_in_pods(settings: Settings, offer: Offer, copy: Path | None = None) -> Examined:
    """As ``preflight``, for pods instead of this machine.

    What lies on the pods' volume is checked where that is mounted, as it is in the head's first container.

    Args:
        copy: a folder here with the model that ``settings.model`` names there.

    Raises:
        ConfigurationError: the service would not start; names the value of the chart, and what is allowed.
    """
    for refusal in _misplaced(settings, offer):
        raise refusal
    known, unchecked = _known_here(settings, offer)
    unchecked += tuple(_unknown_drivers(offer))
    check_settings(known, here=False)
    folder = copy or _folder_here(known, offer)
    model = None if folder is None else ResolvedModel(name=settings.model, path=folder)
    if model is None:
        unchecked += (f"the model's files and memory: {settings.model} is not on this machine (--model names a copy)",)
    else:
        check_model(known, model, here=False)
    for refusal in _too_little(known, offer, model):
        raise refusal
    return Examined(settings=known, folder=folder, unchecked=unchecked)


def _misplaced(settings: Settings, offer: Offer) -> Iterator[ConfigurationError]:
    """Paths in the settings that no pod mounts."""
    volume = offer.storage.path
    named: list[tuple[str, Path]] = [("model", Path(settings.model))]
    named += [("drafter.models", each.folder) for each in read_models(settings.drafter.models or ())]
    named += [("retrieval.index", settings.retrieval.index)] if settings.retrieval.index is not None else []
    # A setting of a source, which mypy does not see.
    snapshot: Path | None = getattr(settings.drafter, _SNAPSHOT)
    named += [(f"drafter.{_SNAPSHOT}", snapshot)] if snapshot is not None else []
    for setting, path in named:
        if path.is_absolute() and not path.is_relative_to(volume):
            yield ConfigurationError(
                f"the pods mount {volume} (storage.mountPath); put it there, and name it so",
                field=f"settings.{setting}",
                value=path,
            )
    log = settings.server.audit_log
    if log is not None and log != "stderr" and not Path(log).is_relative_to(volume) and not Path(log).is_relative_to("/tmp"):
        yield ConfigurationError(
            field="settings.server.audit_log",
            value=log,
            allowed=f"stderr, or a file below {volume} (storage.mountPath) or /tmp",
        )
    indexed, certified = settings.retrieval.enabled or offer.index_url_in_secret, offer.component_certificates
    if certified and indexed and "retrieval" not in certified:
        yield ConfigurationError(
            "with an index, retrieval services need a certificate as drafters do",
            field="componentTls.retrieval",
            value="empty",
        )


def _known_here(settings: Settings, offer: Offer) -> tuple[Settings, tuple[str, ...]]:
    """The settings less what only the pods can see, and that in words."""
    if offer.index_url_in_secret and settings.retrieval.redis_url is None:
        # Any will do: nothing connects to it.
        unnamed = settings.retrieval.model_copy(update={"redis_url": "redis://in-a-secret"})
        settings = settings.model_copy(update={"retrieval": unnamed})
    if offer.storage.path.is_dir():
        return settings, ()
    unchecked = []
    drafter, retrieval, router = settings.drafter, settings.retrieval, settings.router
    if drafter.models:
        unchecked.append(f"drafter.models: {offer.storage.path} is not on this machine")
        drafter = drafter.model_copy(update={"models": None})
    if retrieval.index is not None:
        unchecked.append(f"retrieval.index: {offer.storage.path} is not on this machine")
        retrieval = retrieval.model_copy(update={"index": None, "redis_url": "redis://instead-of-the-folder"})
    if settings.drafter.models and router.strategy in STRATEGIES:
        router = router.model_copy(update={"strategy": AUTO})
    drafter = drafter.model_copy(update={_SNAPSHOT: None})
    changed = {"drafter": drafter, "retrieval": retrieval, "router": router, "cache_dir": cache_folder()}
    return settings.model_copy(update=changed), tuple(unchecked)


def _folder_here(settings: Settings, offer: Offer) -> Path | None:
    path = Path(settings.model)
    if path.is_relative_to(offer.storage.path) and not offer.storage.path.is_dir():
        return None
    return model_folder(settings)


def _too_little(settings: Settings, offer: Offer, model: ResolvedModel | None) -> Iterator[ConfigurationError]:
    """What the pods or the volume have too little of."""
    groups = offer.groups
    yield from _cores(settings, offer)
    yield from _gpus(settings, groups.verifier)
    yield from _drafting_gpus(settings, groups.drafting)
    yield from _drivers(offer)
    for name in ("router", "drafting", "verifier"):
        group: GroupOffer = getattr(groups, name)
        if amount(group.shared_memory) >= amount(group.memory):
            yield ConfigurationError(
                f"is part of the pod's memory, so must be below groups.{name}.memory, {group.memory}",
                field=f"groups.{name}.sharedMemory",
                value=group.shared_memory,
            )
    yield from _volume(settings, offer, model)
    if model is not None:
        yield from _memory(settings, offer, model)


def _cores(settings: Settings, offer: Offer) -> Iterator[ConfigurationError]:
    groups, verifier = offer.groups, settings.verifier
    drafting = settings.drafter.num_cpus + (settings.retrieval.num_cpus if settings.retrieval.enabled else 0)
    wanted = {
        "router": (settings.router.num_cpus, "a router asks for", "settings.router.num_cpus"),
        "drafting": (drafting, "a drafter and its retrieval ask for", "settings.drafter.num_cpus and retrieval.num_cpus"),
        "verifier": (
            verifier.num_cpus * _stages_of_a_pod(settings, groups.verifier),
            "the verifiers or stages of one pod ask for",
            "settings.verifier.num_cpus and stages",
        ),
    }
    for name, (cores, who, setting) in wanted.items():
        group: GroupOffer = getattr(groups, name)
        if cores > amount(group.cpu):
            yield ConfigurationError(f"{who} {cores:g} ({setting})", field=f"groups.{name}.cpu", value=group.cpu)


def _stages_of_a_pod(settings: Settings, group: GroupOffer) -> int:
    """Processes of verifiers in one pod: as many as its GPUs allow, else one verifier's."""
    verifier = settings.verifier
    if not group.gpus or not verifier.num_gpus:
        return verifier.processes
    most = int(group.gpus / verifier.num_gpus)
    return most - most % (verifier.processes if verifier.processes <= most else verifier.tensor_parallel_size)


def _gpus(settings: Settings, group: GroupOffer) -> Iterator[ConfigurationError]:
    verifier = settings.verifier
    each, has = verifier.num_gpus, group.gpus
    on_gpu = verifier.device != "cpu"
    if on_gpu and not has:
        yield ConfigurationError(
            f"settings.verifier.device is {verifier.device}, so every pod needs GPUs",
            field="groups.verifier.gpus",
            value="0",
        )
        return
    if not on_gpu and has:
        yield ConfigurationError(
            "settings.verifier.device is cpu, so they would lie idle; set it to cuda",
            field="groups.verifier.gpus",
            value=has,
        )
        return
    if on_gpu and not each:
        yield ConfigurationError(
            "Ray gives a verifier on cuda the GPUs that it asks for; set it to 1",
            field="settings.verifier.num_gpus",
            value="0",
        )
        return
    if not on_gpu and each:
        yield ConfigurationError(
            "settings.verifier.device is cpu, and the pods have no GPUs",
            field="settings.verifier.num_gpus",
            value=f"{each:g}",
        )
        return
    if not on_gpu:
        return
    together, ranks = each * verifier.processes, verifier.tensor_parallel_size
    of_ranks = f" x tensor_parallel_size {ranks}" if ranks > 1 else ""
    what = f"a verifier takes {together:g} (settings.verifier.stages {verifier.stages}{of_ranks} x num_gpus {each:g})"
    if together <= has:
        if has % together:
            yield ConfigurationError(
                f"{what}, so must be a multiple of {together:g}", field="groups.verifier.gpus", value=has
            )
    elif has % (each * ranks) or together % has:
        yield ConfigurationError(
            f"{what}, so must divide {together:g}, in whole stages, or be a multiple of it",
            field="groups.verifier.gpus",
            value=has,
        )


def _drafting_gpus(settings: Settings, group: GroupOffer) -> Iterator[ConfigurationError]:
    device, here = trained_config(settings).device, settings.drafter.models_in == "drafter"
    if here and device != "cpu" and not group.gpus:
        yield ConfigurationError(
            f"settings.drafter.device is {device}, so every pod needs one", field="groups.drafting.gpus", value="0"
        )
    if settings.drafter.num_gpus > group.gpus:
        yield ConfigurationError(
            f"settings.drafter.num_gpus is {settings.drafter.num_gpus:g}", field="groups.drafting.gpus", value=group.gpus
        )
    if group.gpus and not settings.drafter.num_gpus:
        yield ConfigurationError(
            "settings.drafter.num_gpus is 0, so they would lie idle", field="groups.drafting.gpus", value=group.gpus
        )


def _drivers(offer: Offer) -> Iterator[ConfigurationError]:
    for name, group in _with_gpus(offer):
        if group.gpu_driver is not None and too_old(group.gpu_driver):
            yield ConfigurationError(
                f"the image's CUDA {IMAGE_CUDA} needs {OLDEST_DRIVER} or later",
                field=f"groups.{name}.gpuDriver",
                value=group.gpu_driver,
            )


def _unknown_drivers(offer: Offer) -> Iterator[str]:
    for name, group in _with_gpus(offer):
        if group.gpu_driver is None:
            yield (
                f"the driver of the nodes with GPUs: the image's CUDA {IMAGE_CUDA} needs NVIDIA's {OLDEST_DRIVER} or later "
                f"(groups.{name}.gpuDriver names theirs)"
            )


def _with_gpus(offer: Offer) -> Iterator[tuple[str, GroupOffer]]:
    groups = {"drafting": offer.groups.drafting, "verifier": offer.groups.verifier}
    return ((name, group) for name, group in groups.items() if group.gpus)


def _volume(settings: Settings, offer: Offer, model: ResolvedModel | None) -> Iterator[ConfigurationError]:
    size = offer.storage.size
    if size is None:
        return
    least = BUILT_IN_BYTES if settings.model == BUILT_IN else 0
    if model is not None:
        least = max(least, sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file()))
    if amount(size) < least:
        yield ConfigurationError(
            (
                f"the files of {settings.model} alone take {least / _MIB:,.0f} MiB, and indexes, measurements and "
                "what is unpacked come besides"
            ),
            field="storage.size",
            value=size,
        )


def _memory(settings: Settings, offer: Offer, model: ResolvedModel) -> Iterator[ConfigurationError]:
    verifier, group = settings.verifier, offer.groups.verifier
    config = component_configs.read_model_config(model.path)
    weights = model_files.count_weights(check_weights(model.path, config))
    drafting = memory_here(settings, model)
    beside = settings.drafter.models_in == "verifier"
    try:
        if verifier.device == "cpu":
            given = f"{group.shared_memory} of it sharedMemory"
            refused = partial(ConfigurationError, field="groups.verifier.memory", value=group.memory, given=given)
            room = amount(group.memory) - amount(group.shared_memory)
            model_files.check_fits(verifier, config, weights, room, verifier.processes, drafting if beside else 0)
        elif group.gpu_memory is not None:
            refused = partial(ConfigurationError, field="groups.verifier.gpuMemory", value=group.gpu_memory)
            model_files.check_fits(verifier, config, weights, amount(group.gpu_memory) * verifier.num_gpus, 1)
    except ConfigurationError as error:
        yield refused(str(error))
    pod = offer.groups.drafting
    if not beside and drafting > amount(pod.memory) - amount(pod.shared_memory):
        yield ConfigurationError(
            f"the models that draft take {drafting / _MIB:,.0f} MiB (settings.drafter.models)",
            field="groups.drafting.memory",
            value=pod.memory,
            given=f"{pod.shared_memory} of it sharedMemory",
        )


def too_old(driver: str) -> bool:
    """Whether a driver such as 570.148.08 does not run the image's CUDA."""
    return int(driver.partition(".")[0]) < OLDEST_DRIVER
