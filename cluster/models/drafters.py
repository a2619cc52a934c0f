"""Finds the models that draft: those of the settings, or, without any, those that come with Outrider for the target."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import drafters
from cluster.models.named_models import NamedModel, read_models
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from services.drafter.config import TrainedConfig
from services.drafter.heads.files.kinds import Checkpoint, inspect
from services.settings import filled
from speculation.errors import ConfigurationError
from speculation.sources import kind_of, source_of

if TYPE_CHECKING:
    from services.drafter.draft_model.language_model import LanguageModel
    from services.drafter.heads.canary.noise import NoiseTrial
    from services.drafter.heads.products import MakeProduct
    from services.verifier.model.stream_rows import StreamWeights

log = logging.getLogger(__name__)

_STREAMING = "streaming"
_MTP = "mtp"
_UNO = "uno"
_HEADS = {"eagle", "eagle3", "fspad", _MTP}
_BUNDLED = Path(drafters.__file__).parent


def draft_models(settings: Settings, model: ResolvedModel) -> Mapping[str, Checkpoint]:
    """The models that draft for ``model``, by source. If its folder is not here yet, less is checked.

    Where no folders are named, the strategy ``mtp`` means the layer that the target brings along.

    Raises:
        ConfigurationError: a folder of ``drafter.models`` cannot be used, two hold weights of the same source, or a setting
            is for a kind of model of which there is none, or contradicts another.
    """
    named = None if settings.drafter.models is None else read_models(settings.drafter.models)
    target = model.path if (model.path / "config.json").is_file() else None
    found: dict[str, Checkpoint] = {}
    for each in [NamedModel(folder=folder) for folder in bundled(model.name)] if named is None else named:
        try:
            checkpoint = inspect(each.folder.expanduser().resolve(), target)
        except ConfigurationError as error:
            if named is not None:
                raise
            # Another model may have the same name; nobody asked for these weights.
            log.warning("the drafter weights that come with Outrider for %s are not used: %s", model.name, error)
            continue
        source = source_of(checkpoint.source, each.name) if each.name else checkpoint.source
        if (other := found.get(source)) is not None:
            raise ConfigurationError(
                f"both are weights of {source}; give one of them a name",
                field="drafter.models",
                verb="names",
                value=f"{other.folder} and {each.folder}",
            )
        found[source] = checkpoint
    _check_uno(settings, found)
    if named is None and target is not None and settings.router.strategy == _MTP:
        found[_MTP] = _own_mtp(target)
    _check_used(settings, found)
    form, below = settings.drafter.streaming_form, settings.drafter.streaming_prune_below
    if below and form == "two_steps":
        raise ConfigurationError(
            "use one_pass or cheaper, or leave it 0",
            field="drafter.streaming_prune_below",
            value=below,
            given="but drafter.streaming_form is two_steps, where no pass holds streams",
        )
    if form != "two_steps":
        source = _streams(found, form)
        streams = found[source]
        own = streams.layers if form == "cheaper" else ()
        found[source] = replace(streams, layers=(*own, *streams.layers_in_pass))
    return found


def _streams(found: Iterable[str], form: str) -> str:
    """The source whose streams the target computes in its own passes."""
    sources = [source for source in found if kind_of(source) == _STREAMING]
    if len(sources) != 1:
        lacks = (
            "there are no weights of streaming"
            if not sources
            else f"a pass holds the streams of one of {', '.join(sources)}"
        )
        raise ConfigurationError(field="drafter.streaming_form", value=form, given=f"but {lacks}")
    return sources[0]


def _own_mtp(target: Path) -> Checkpoint:
    checkpoint = inspect(target, target)
    if checkpoint.source != _MTP:
        raise ConfigurationError(
            "name a folder with an MTP layer for it in drafter.models, or another strategy",
            field="router.strategy",
            value=_MTP,
            given=f"but {target} holds no MTP layer of a known layout",
        )
    return checkpoint


def _check_used(settings: Settings, found: Mapping[str, Checkpoint]) -> None:
    """Settings of a kind of model of which there is none would be ignored."""
    config = trained_config(settings)
    size, policy, kinds = config.num_draft_tokens, config.stop.policy, {kind_of(source) for source in found}
    if size is not None and not _HEADS & kinds:
        raise ConfigurationError(
            "leave it out, or name a head in drafter.models",
            field="drafter.speculative_num_draft_tokens",
            value=size,
            given=f"but there are no weights of {', '.join(sorted(_HEADS))}, whose tree it sizes",
        )
    if config.medusa_choices is not None and "medusa" not in kinds:
        raise ConfigurationError(
            "leave it out, or name Medusa's heads in drafter.models",
            field="drafter.medusa_choices",
            value=config.medusa_choices,
            given="but there are no weights of medusa, whose tree it is",
        )
    if policy != "static" and "draft_model" not in kinds:
        raise ConfigurationError(
            "leave it out, or name one in drafter.models",
            field="drafter.stop_policy",
            value=policy,
            given="but there is no draft_model, whose chains it ends",
        )


def _check_uno(settings: Settings, found: Mapping[str, Checkpoint]) -> None:
    """Check that the target's passes can hold the noise by which it drafts."""
    config, adapters = trained_config(settings), [source for source in found if kind_of(source) == _UNO]
    if len(adapters) > 1:
        raise ConfigurationError(
            "a pass holds the noise of one; leave out the others",
            field="drafter.models",
            verb="names",
            value=f"the adapters {', '.join(adapters)}",
        )
    if config.uno_branches and not adapters:
        raise ConfigurationError(
            "leave it out, or name Uno's adapter in drafter.models",
            field="drafter.uno_branches",
            value=config.uno_branches,
            given="but there are no weights of uno, whose noise it places",
        )
    most = settings.verifier.max_nodes
    if adapters and config.num_steps is not None and config.num_steps > most:
        raise ConfigurationError(
            field="drafter.speculative_num_steps",
            value=config.num_steps,
            given=f"rows of noise for {adapters[0]}",
            allowed=f"at most {most}, verifier.max_nodes: a pass holds no more",
        )


def uno_folder(settings: Settings, model: ResolvedModel) -> Path | None:
    """The folder of the adapter by which the target itself drafts; None: there is none.

    Raises:
        ConfigurationError: as ``draft_models``.
    """
    # Among those that come along there is none: their folders need not be read for it.
    if not settings.drafter.models and not trained_config(settings).uno_branches:
        return None
    found = draft_models(settings, model)
    return next((each.folder for source, each in found.items() if kind_of(source) == _UNO), None)


def noise_trial(settings: Settings, model: ResolvedModel) -> NoiseTrial | None:
    """What tries that adapter where the target is; None: there is none.

    Raises:
        ConfigurationError: as ``draft_models``.
    """
    if (folder := uno_folder(settings, model)) is None:
        return None
    from services.drafter.heads.canary.noise import NoiseTrial

    return NoiseTrial(folder, model.path)


def observed_layers(settings: Settings, model: ResolvedModel) -> tuple[int, ...]:
    """The layers whose hidden states the sources of this configuration ask for.

    Raises:
        ConfigurationError: as ``draft_models``.
    """
    found = {layer for each in draft_models(settings, model).values() for layer in each.layers}
    return tuple(sorted(found | ({-1} if settings.retrieval.semantic else set())))


def stream_weights(settings: Settings, model: ResolvedModel) -> StreamWeights | None:
    """The streams that the target computes in its own passes; None: it computes none.

    Raises:
        ConfigurationError: as ``draft_models``; or they cannot be read.
    """
    if settings.drafter.streaming_form == "two_steps":
        return None
    found = draft_models(settings, model)
    folder = found[_streams(found, settings.drafter.streaming_form)].folder
    return read_stream_weights(folder, model.path, settings.drafter.streaming_prune_below)


def read_stream_weights(folder: Path, target: Path, prune_below: float = 0.0) -> StreamWeights:
    """The streams of a checkpoint, as the target in ``target`` computes them in its own passes.

    Args:
        prune_below: see ``Pruning.below``; 0: nothing is pruned.

    Raises:
        ConfigurationError: they cannot be read, are another target's, or have no early exit to prune by.
    """
    # They import torch, which commands that only read settings do without.
    from services.drafter.heads.streams.files import read_streams
    from services.verifier.kernels.native.low_rank_kernel import LowRank
    from services.verifier.model.early_exit import Pruning
    from services.verifier.model.stream_rows import StreamWeights

    stored = read_streams(folder, target)
    early = stored.pruning
    if prune_below and early is None:
        raise ConfigurationError(
            "train them with pruning_rank, or leave it 0",
            field="drafter.streaming_prune_below",
            value=prune_below,
            given=f"but the streams at {folder} have no early exit",
        )
    return StreamWeights(
        where=str(folder),
        embeddings=stored.embeddings,
        adapters=tuple(
            {name: LowRank(down=down, up=up) for name, (down, up) in layer.items()} for layer in stored.adapters()
        ),
        pruning=Pruning(adapter=LowRank(down=early[0], up=early[1]), below=prune_below) if prune_below and early else None,
    )


def by_kernels(
    folder: Path, target: Path, kept: Sequence[int] | None, *, dtype: Literal["float32", "int8"] = "float32"
) -> LanguageModel:
    """The draft model in ``folder`` for ``target`` over the target's kernels, for ``TrainedConfig.draft_kernels``.

    Args:
        dtype: int8 rounds its weights to eight bits; otherwise they are as stored.

    Raises:
        ConfigurationError: they do not compute it; says why.
    """
    from cluster.models.draft_kernels import KernelLM

    return KernelLM(folder, target, kept, dtype)


def linear_kernels() -> MakeProduct | None:
    """What makes linear layers over the target's kernels, for ``TrainedConfig.linear_kernels``; None: none are here."""
    from services.verifier.kernels.native.library import library
    from services.verifier.kernels.native.linear_kernel import NativeLinear

    kernels = library()
    return None if kernels is None else functools.partial(NativeLinear, kernels)


def trained_config(settings: Settings) -> TrainedConfig:
    """Settings of the sources that run a model, which is not named yet."""
    return filled(TrainedConfig, settings.drafter)


def with_checkpoints(config: TrainedConfig, settings: Settings, found: Mapping[str, Checkpoint]) -> TrainedConfig:
    """``config`` with the models ``found``, and which of them are wanted from the start."""
    folders = {name: each.folder for name, each in found.items()}
    return replace(
        config,
        checkpoints=folders,
        asked_for=settings.drafter.models is not None,
        default_strategy=settings.router.strategy,
    )


def memory_here(settings: Settings, model: ResolvedModel) -> int:
    """Bytes of this machine's memory that the models take which are loaded at start to draft for ``model``."""
    config = trained_config(settings)
    found = draft_models(settings, model)
    loaded = [found[name] for name in with_checkpoints(config, settings, found).at_start]
    return sum(each.bytes_in(config.dtype) for each in loaded if config.device == "cpu" or each.in_target)


def bundled(model: str) -> list[Path]:
    """The folders of weights that come with Outrider for the model of this name."""
    folder = _BUNDLED / Path(model).name.strip(".").lower()
    return sorted(file.parent for file in folder.glob("*/config.json"))
