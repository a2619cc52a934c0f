"""Checks within a second or two whether the service could start, before anything is fetched, loaded or started.

``outrider plan``, ``serve`` on Ray and ``serve`` in one process all use these checks, so that all accept the same settings.
torch and Ray are not imported.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cluster.checks import host, model_files
from cluster.checks.model_files import check_adapters
from cluster.checks.working_directory import check_working_directory
from cluster.models.drafters import draft_models, memory_here, trained_config
from cluster.models.target import BUILT_IN, ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import Settings
from cluster.settings.recognition import check_shared_secrets, check_tls_files
from services.api.descriptors import check_room
from services.api.sockets import bind_ops, check_http, check_server
from services.machine.processor import free_memory
from services.model_files import gguf_header
from services.model_files.folder import reading, text_config
from services.model_files.generation_config import GenerationConfig, read_generation_config
from services.model_files.weights.headers import check_weights
from services.router.tokenizer_file import open_file
from services.verifier.loading.rank_sizes import check_split
from services.verifier.loading.refusals import check_config
from speculation.errors import ConfigurationError
from speculation.sources import kind_of

# Size of the file to fetch; the unpacked model may need more.
BUILT_IN_BYTES = 120 * 2**20
# A possible name on the Hugging Face hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def preflight(
    settings: Settings, model: ResolvedModel | None = None, *, here: bool = True, memory: Callable[[], float] = free_memory
) -> tuple[str, ...]:
    """Check everything that can be checked before the start.

    Args:
        model: the model, if it was fetched already; None: it is looked for locally, but not fetched.
        here: whether the components will run on this machine; another one has other ports, memory and GPUs.
        memory: bytes that are free here.

    Returns:
        What was not checked, in words.

    Raises:
        ConfigurationError: the service would not start; names the setting, its value and what is allowed.
    """
    check_settings(settings, here=here)
    folder = model.path if model is not None else model_folder(settings)
    if folder is None:
        if model is None and settings.model == BUILT_IN:
            host.check_folder("cache_dir", settings.cache_dir, BUILT_IN_BYTES)
        _check_index(settings, None)
        return ("the model's files, memory and index: the model is fetched or converted at its first start",)
    named = ResolvedModel(name=model.name if model else settings.model, path=folder)
    return check_model(settings, named, here=here, memory=memory)


def check_settings(settings: Settings, *, here: bool) -> None:
    """Check what needs no model.

    Raises:
        ConfigurationError: see ``preflight``.
    """
    named = ResolvedModel(name=settings.model, path=Path(settings.model))
    _check_stop(settings, named)
    server, http = component_configs.server_config(settings), component_configs.http_config(settings)
    component_configs.router_config(settings, named)
    component_configs.drafter_config(settings, named)
    component_configs.verifier_config(settings, named)
    settings.retrieval.check_place()
    twice = [address for address, count in Counter(settings.router.verifiers).items() if count > 1]
    if twice:
        raise ConfigurationError("name each verifier once", field="router.verifiers", verb="has twice", value=twice[0])
    for address in settings.router.verifiers or ([settings.drafter.address] if settings.drafter.address is not None else ()):
        check_shared_secrets(settings, host=address.rpartition(":")[0])
    host.check_folder("cache_dir", settings.cache_dir)
    if settings.drafting_dir is not None:
        host.check_folder("drafting_dir", settings.drafting_dir)
    _check_ops_port(settings)
    if not here:
        return
    check_room(server, http=http is not None)
    check_working_directory()
    check_server(server, first=True)
    if http is not None:
        check_http(http, first=True)
    if (port := settings.server.ops) is not None:
        bind_ops(settings.server.ops_host, port).close()
    check_tls_files(settings)
    if settings.router.verifiers:
        return
    host.check_device(settings.verifier.device)
    if settings.drafter.address is not None:
        return
    host.check_interface("drafter.host", settings.drafter.host)
    if settings.retrieval.enabled:
        host.check_interface("retrieval.host", settings.retrieval.host)
    host.check_device(trained_config(settings).device, "drafter.device")


def _check_ops_port(settings: Settings) -> None:
    public = {"server.port": settings.server.port, "server.http_port": settings.server.http}
    port = settings.server.ops
    if port and (same := [name for name, number in public.items() if number == port]):
        raise ConfigurationError(
            field="server.ops_port", value=port, given=f"as {same[0]}", allowed="another one, 0 or null"
        )


def _check_stop(settings: Settings, model: ResolvedModel) -> None:
    stop = trained_config(settings).stop
    if stop.policy == "disco" or stop.disco is not None:
        # It imports numpy, which commands that only read settings do without.
        from services.drafter.stopping.policies import check_stop

        drafts = draft_models(settings, model) if stop.policy == "disco" and stop.disco is None else {}
        check_stop(stop, [each.folder for source, each in drafts.items() if kind_of(source) == "draft_model"])


def model_folder(settings: Settings) -> Path | None:
    """The folder of the model, if it is on this machine; nothing is fetched.

    Raises:
        ConfigurationError: there is no such model.
    """
    with reading(f"look at the model {settings.model}", about=settings.model):
        return _folder_of(settings.model, settings.cache_dir)


def _folder_of(name: str, cache_dir: Path) -> Path | None:
    path = Path(name).expanduser()
    if name == BUILT_IN:
        kept = cache_dir / "models" / BUILT_IN
        return kept if (kept / "config.json").is_file() else None
    if path.suffix == ".gguf" and not path.is_dir():
        _check_gguf(name, path)
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                "the folder has no config.json (for GGUF, name the .gguf file)", field="model", value=name
            )
        return path.resolve()
    if path.exists():
        raise ConfigurationError(field="model", value=name, allowed="a folder with config.json, or a .gguf file")
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "/", "~")):
        raise ConfigurationError(
            f"no such folder; use {BUILT_IN}, a folder, a .gguf file or a name that the hub knows", field="model", value=name
        )
    return _in_hub_cache(name)


def _check_gguf(name: str, path: Path) -> None:
    if not path.is_file():
        raise ConfigurationError("no such file", field="model", value=name)
    gguf_header.check(path)


def _in_hub_cache(name: str) -> Path | None:
    """The folder of a model that was fetched from the Hugging Face hub before."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ConfigurationError(
                "neither a folder here nor fetched before, and HF_HUB_OFFLINE forbids asking the hub",
                field="model",
                value=name,
            ) from None
        return None
    return snapshot if (snapshot / "config.json").is_file() else None


def check_model(
    settings: Settings, model: ResolvedModel, *, here: bool, memory: Callable[[], float] = free_memory
) -> tuple[str, ...]:
    """Check the model's files, and what the settings ask of it. Returns what was not checked.

    Raises:
        ConfigurationError: see ``preflight``.
    """
    verifier, folder = settings.verifier, model.path
    with reading(f"load the model at {folder}", about=folder):
        config = check_config(folder)
        check_split(verifier.stages, verifier.tensor_parallel_size, text_config(component_configs.read_model_config(folder)))
        model_files.check_lengths(verifier, config)
        weights = model_files.count_weights(check_weights(folder, config))
    generation_config(settings, folder)
    check_adapters(settings, model, here=here and not settings.router.verifiers)
    # Models that draft for another target are found now that this one is.
    component_configs.router_config(settings, model)
    # Tokenisers that need transformers are left to the router.
    open_file(folder)
    _check_index(settings, folder)
    if settings.router.verifiers:
        return ("the verifiers of router.verifiers, which are not asked",)
    if not here:
        return ("memory, ports and devices of the machines of that Ray",)
    if verifier.device != "cpu":
        return ("the GPU's memory",)
    # Stages connected over loopback share this machine.
    processes = verifier.processes if ipaddress.ip_address(verifier.stage_host).is_loopback else 1
    drafting = memory_here(settings, model)
    model_files.check_fits(verifier, config, weights, memory(), processes, drafting)
    return ()


def _check_index(settings: Settings, model: Path | None) -> None:
    if not settings.retrieval.enabled:
        return
    if model is not None:
        component_configs.retrieval_config(settings, ResolvedModel(name=settings.model, path=model))
    elif settings.retrieval.index is not None:
        from retrieval_index.manifest import read_manifest

        read_manifest(settings.retrieval.index)


def generation_config(settings: Settings, folder: Path | None = None) -> GenerationConfig | None:
    """The model's generation config; None if the model is not on this machine.

    Raises:
        ConfigurationError: it cannot be read, or asks for what cannot be honoured.
    """
    folder = folder or model_folder(settings)
    if folder is None:
        return None
    vocabulary = text_config(component_configs.read_model_config(folder)).get("vocab_size")
    verifier = settings.verifier
    return read_generation_config(
        folder,
        verifier.generation_config,
        verifier.override_generation_config,
        vocab_size=vocabulary if isinstance(vocabulary, int) else None,
    )
