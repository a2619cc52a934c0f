"""The part of the settings that each component gets, checked."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from cluster.models.drafters import (
    by_kernels,
    draft_models,
    linear_kernels,
    observed_layers,
    uno_folder,
    with_checkpoints,
)
from cluster.models.named_models import held_models, router_drafters
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from services.api.config import HttpConfig, PublicServerConfig, StoredResponses, TlsFiles
from services.drafter.config import DrafterConfig, SuffixConfig, TrainedConfig
from services.model_files.folder import known_tokenizer, read_json, text_config
from services.retrieval.config import AnswersConfig, RetrievalConfig
from services.router.config import RouterConfig
from services.router.learning.config import LearningConfig
from services.router.learning.learning import check_learning
from services.router.rules.rule_book import rules_of
from services.router.strategies import StrategyConfig, check_default
from services.settings import filled
from services.verifier.config import TargetConfig, VerifierConfig, check_backends
from services.verifier.engine.config import LoopConfig
from services.verifier.loading.rank_sizes import check_split
from speculation.errors import ConfigurationError
from speculation.held_models import DrafterCard

# Folder of kernel measurements, within the cache folder.
KERNELS = "kernel-choices"


def drafter_config(settings: Settings, model: ResolvedModel) -> DrafterConfig:
    """The part of ``settings`` that a drafter service needs.

    Raises:
        ConfigurationError: prompt_lookup_min is above prompt_lookup_max, or a folder of drafter.models cannot be used.
    """
    own = settings.drafter
    return _drafter_config(settings, model, models=own.models_in == "drafter" and own.address is None)


def outside_drafter_config(settings: Settings, model: ResolvedModel) -> DrafterConfig:
    """The same for the drafter at ``drafter.address``, wherever that is: its settings may be those of the service."""
    return _drafter_config(settings, model, models=settings.drafter.models_in == "drafter")


def drafter_card(settings: Settings, model: ResolvedModel) -> DrafterCard:
    """What that drafter tells of itself."""
    found = draft_models(settings, model) if settings.drafter.models_in == "drafter" else {}
    return DrafterCard(
        held=held_models(settings, found),
        target=public_name(model),
        tokenizer=known_tokenizer(model.path),
        version=metadata.version("outrider-server"),
    )


def drafter_beside_config(settings: Settings, model: ResolvedModel) -> DrafterConfig:
    """The same for the drafter in the verifier's process."""
    return replace(_drafter_config(settings, model, models=True), calibration=None)


def _drafter_config(settings: Settings, model: ResolvedModel, *, models: bool) -> DrafterConfig:
    """The same, with or without the sources that run models."""
    config = filled(DrafterConfig, settings.drafter)
    lookup = config.prompt_lookup
    if lookup.prompt_lookup_min > lookup.prompt_lookup_max:
        raise ConfigurationError(
            field="drafter.prompt_lookup_min",
            value=lookup.prompt_lookup_min,
            allowed=f"at most prompt_lookup_max, {lookup.prompt_lookup_max}",
        )
    kept = _written(settings) / "drafting" / _as_name(settings.model)
    found = draft_models(settings, model) if models else {}
    rounded = config.trained.dtype == "int8"
    if rounded and config.trained.device != "cpu":
        raise ConfigurationError(
            field="drafter.dtype",
            value="int8",
            given=f"but drafter.device is {config.trained.device}",
            allowed="float32, bfloat16 or float16 on a GPU",
        )
    on_gpu, kernels = config.trained.device != "cpu", settings.verifier.kernels
    trained = replace(
        config.trained,
        target=model.path,
        captures=kernels if on_gpu and kernels in ("triton", "cublaslt") else "",
        draft_kernels=functools.partial(by_kernels, dtype="int8") if rounded else by_kernels,
        linear_kernels=linear_kernels,
    )
    return replace(
        config,
        trained=with_checkpoints(trained, settings, found),
        recycling=replace(config.recycling, snapshot=_snapshot(config.recycling.snapshot, settings.retrieval.index)),
        calibration=kept if settings.drafter.keep_calibration else None,
    )


def _written(settings: Settings) -> Path:
    """The folder in which drafters and retrieval services write."""
    return settings.cache_dir if settings.drafting_dir is None else settings.drafting_dir


def _snapshot(named: Path | None, index: Path | None) -> Path | None:
    """The file that token recycling starts from: the named one, else the index's own, else None.

    Raises:
        ConfigurationError: the named file does not exist.
    """
    if named is not None:
        if not named.is_file():
            raise ConfigurationError("no such file", field="drafter.recycling_snapshot", value=named)
        return named
    if index is None:
        return None
    from speculation.successor_table import FILE

    # Not checked against the model's tokenizer here: opening the index does that.
    beside = index / FILE
    return beside if beside.is_file() else None


def _as_name(model: str) -> str:
    """A file name for a model: a readable part and a hash."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", model).strip("-")[-64:]
    return f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def retrieval_config(settings: Settings, model: ResolvedModel) -> RetrievalConfig:
    """The retrieval service's part of ``settings``.

    Raises:
        ConfigurationError: both a folder and Redis are named, the folder holds no index or one for another tokenizer, the
            URL is invalid, or the model has no tokenizer.
    """
    from retrieval_index.index import check_index
    from retrieval_index.manifest import read_manifest
    from retrieval_index.store import IndexStore
    from services.model_files.folder import tokenizer_digest

    retrieval = settings.retrieval
    retrieval.check_place()
    digest = tokenizer_digest(model.path)
    if retrieval.index is not None:
        manifest = read_manifest(retrieval.index)
        check_index(manifest, digest, str(retrieval.index), semantic=retrieval.semantic)
    if retrieval.redis_url is not None:
        IndexStore(retrieval.redis_url, retrieval.name, retrieval.redis_password).close()
    return filled(
        RetrievalConfig,
        retrieval,
        cache_dir=_written(settings) / "indexes",
        tokenizer_sha256=digest,
        state_width=_hidden_size(model.path) if retrieval.semantic else None,
    )


def read_model_config(model: Path) -> dict[str, Any]:
    """The model's config.json; empty if there is none.

    Raises:
        ConfigurationError: it cannot be read.
    """
    return read_json(file) if (file := model / "config.json").is_file() else {}


def _hidden_size(model: Path) -> int:
    """Width of a model's hidden states.

    Raises:
        ConfigurationError: its config.json does not name it.
    """
    content = read_model_config(model)
    width = text_config(content).get("hidden_size")
    if not isinstance(width, int):
        raise ConfigurationError(
            f"{model}/config.json names no hidden_size: retrieval.semantic cannot be used with this model",
            about=f"{model}/config.json",
        )
    return width


def states_stay(settings: Settings, *, in_process: bool) -> bool:
    """Whether all that read the target's states do so in the verifier's process and on its device.

    Args:
        in_process: all components share that process.
    """
    drafter, verifier = settings.drafter, settings.verifier
    # States also ask a semantic index, which is not there.
    if drafter.address is not None or settings.retrieval.semantic or verifier.stages * verifier.tensor_parallel_size > 1:
        return False
    device = filled(TrainedConfig, drafter).device
    devices = {"cuda:0" if each == "cuda" else each for each in (device, verifier.device)}
    return len(devices) == 1 and (in_process or drafter.models_in == "verifier")


def verifier_config(settings: Settings, model: ResolvedModel, *, in_process: bool = False) -> VerifierConfig:
    """The verifier's part of ``settings``; ``in_process`` as in ``states_stay``.

    Raises:
        ConfigurationError: stages, ranks, stage_host, kernels, attention_backend or drafter.models cannot be as they are.
    """
    verifier = settings.verifier
    check_split(verifier.stages, verifier.tensor_parallel_size, text_config(read_model_config(model.path)))
    try:
        ipaddress.ip_address(verifier.stage_host)
    except ValueError as error:
        raise ConfigurationError(field="verifier.stage_host", value=verifier.stage_host, allowed="an IP address") from error
    loop = filled(LoopConfig, verifier)
    loop = replace(loop, max_batched_tokens=loop.prompt_rows(verifier.device))
    observed = observed_layers(settings, model) if verifier.device != "cpu" else ()
    # By the loop, and by the sessions of the drafter beside it.
    kept = loop.kept_feature_bytes + filled(DrafterConfig, settings.drafter).max_feature_bytes if observed else 0
    target = filled(
        TargetConfig,
        verifier,
        model_path=str(model.path),
        kernels_dir=settings.cache_dir / KERNELS,
        pass_rows=verifier.max_num_seqs * (1 + verifier.max_nodes) + loop.prompt_rows(),
        pass_requests=verifier.max_num_seqs,
        draft_adapter=uno_folder(settings, model),
        observed_layers=observed,
        states_stay=states_stay(settings, in_process=in_process),
        kept_state_bytes=kept,
    )
    check_backends(target)
    return filled(
        VerifierConfig, verifier, model_name=model.name, target=target, loop=loop, costs_dir=settings.cache_dir / "costs",
        tokenizer=known_tokenizer(model.path),
    )  # fmt: skip


def public_name(model: ResolvedModel) -> str:
    """What users call a model: where it lies on this machine is not theirs to know."""
    path = Path(model.name).expanduser()
    if not path.exists():
        return model.name
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def names_of(settings: Settings, model: ResolvedModel) -> tuple[str, ...]:
    """The names by which requests ask for the model itself."""
    return settings.server.served_model_name or (public_name(model),)


def router_config(settings: Settings, model: ResolvedModel) -> RouterConfig:
    """The router's part of ``settings``.

    Raises:
        ConfigurationError: the default strategy is unknown or cannot be served, retrieval.semantic is set without an index,
            a folder of drafter.models cannot be used, a rule is wrong, or the acceptance rule is rejection and the drafter
            is not trusted.
    """
    router = settings.router
    if router.acceptance == "rejection" and not settings.drafter.trusted:
        raise ConfigurationError(
            "under this rule answers depend on what drafters claim to have drawn from; use acceptance: walk",
            field="router.acceptance",
            value="rejection",
            given="but drafter.trusted is false",
        )
    if settings.retrieval.semantic and not settings.retrieval.enabled:
        raise ConfigurationError(
            "set retrieval.index or retrieval.redis_url",
            field="retrieval.semantic",
            value="true",
            given="but there is no index",
        )
    in_memory = filled(SuffixConfig, settings.drafter).max_cached_tokens
    filled(AnswersConfig, settings.retrieval).check(settings.retrieval.redis_url, in_memory)
    strategy = filled(
        StrategyConfig,
        router,
        retrieval=settings.retrieval.enabled,
        semantic=settings.retrieval.semantic,
        trained=router_drafters(settings, draft_models(settings, model)),
        registers=settings.drafter.address is not None or bool(router.verifiers),
    )
    check_default(strategy)
    learning = filled(LearningConfig, router, alone=router.most == 1, scope="\n".join(names_of(settings, model)))
    if learning.on:
        check_learning(learning, strategy)
    config = filled(
        RouterConfig,
        router,
        model_path=str(model.path),
        strategy=strategy,
        generic_tools=settings.server.tools == "any",
        thoughts=settings.server.reasoning == "auto",
        names=names_of(settings, model),
        loads_adapters=bool(settings.verifier.lora_folders),
        tokenizer=known_tokenizer(model.path) if settings.router.verifiers else "",
        learning=learning,
    )
    rules_of(config)
    return config


def server_config(settings: Settings) -> PublicServerConfig:
    """The public server's part of ``settings``.

    Raises:
        ConfigurationError: only one of the two TLS files is named.
    """
    server = settings.server
    files = (server.tls_certificate, server.tls_key)
    if (files[0] is None) != (files[1] is None):
        raise ConfigurationError(
            "server.tls_certificate and server.tls_key go together: set both or neither",
            about="server.tls_certificate and server.tls_key",
        )
    tls = TlsFiles(certificate=files[0], key=files[1]) if files[0] and files[1] else None
    return filled(PublicServerConfig, server, tls=tls, shared=settings.router.most > 1)


def http_config(settings: Settings) -> HttpConfig | None:
    """The HTTP server's part of ``settings``; None: there is none.

    Raises:
        ConfigurationError: see ``server_config``, both servers have one port, or a password is for no Redis.
    """
    server, public = settings.server, server_config(settings)
    if server.http is None:
        return None
    if server.http_port == server.port != 0:
        raise ConfigurationError(
            "gRPC and HTTP need a port each", field="server.http_port", value=server.http_port, given="as server.port"
        )
    responses = filled(StoredResponses, server)
    if responses.redis_password is not None and responses.redis_url is None:
        raise ConfigurationError(
            "set both or neither",
            field="server.stored_responses_redis_password",
            value="set",
            given="but not server.stored_responses_redis_url",
        )
    if public.shared and responses.redis_url is None:
        # What follows an answer may come to another router, which would not know it.
        responses = replace(responses, most=0)
    return filled(HttpConfig, server, public=public, port=server.http, responses=responses)
