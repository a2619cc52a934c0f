"""By what a target is made and computed. A test hands in others, such as those of a device that the machine lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from services.verifier.attention.on_gpu import GPU_ATTENTION, GpuAttention
from services.verifier.choosing.greatest import Finder, finder_on
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.config import TargetConfig
from services.verifier.kernels import experts
from services.verifier.kernels.cpu_choice import Choice, choose_kernels, maker
from services.verifier.kernels.gpu_choice import Settle, alone, use_gpu_kernels
from services.verifier.kernels.linears import as_linears, pack_linears
from services.verifier.kernels.parameters import pack_parameters, unpack_parameters
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.recurrence.on_gpu import steps_on
from services.verifier.recurrence.state_pool import FindSteps

log = logging.getLogger(__name__)


def pack_layers(model: PreTrainedModel, config: TargetConfig, settle: Settle = alone) -> Choice:
    """Replace linear layers by faster ones; returns which.

    Args:
        settle: makes all processes of a target choose the same ones for GPUs.
    """
    if config.device != "cpu":
        return use_gpu_kernels(model, config, settle)
    fill_vectors()
    experts.use(model)
    if config.dtype == "bfloat16":
        return Choice(linears="torch")
    as_linears(model)
    choice = choose_kernels(model, config)
    make = maker(choice, config.dtype)
    if make is not None:
        log.info("packed %d linear layers", pack_linears(model, make))
        # Weights that route rows to experts are not rounded.
        single = maker(choice)
        assert single is not None
        log.info("%d other parameters are packed when they are first used", pack_parameters(model, make, single))
    else:
        unpack_parameters(model)
    # Parameters that are not packed become float32, the type of all arithmetic.
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return choice


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMeans:
    """What a target is put together from.

    Attributes:
        pack: replaces a model's layers by faster ones; returns which.
        attention: see ``GpuAttention``.
        steps: finds what steps states on a device.
        find: our kernel for the likeliest tokens on a device; None: there is none.
        reader: says where logits lie.
    """

    pack: Callable[[PreTrainedModel, TargetConfig], Choice] = pack_layers
    attention: GpuAttention = GPU_ATTENTION
    steps: FindSteps = steps_on
    find: Callable[[torch.device], Finder | None] = finder_on
    reader: LogitsReader = READER

    def settling(self, config: TargetConfig, settle: Settle) -> TargetMeans:
        """These, with kernels for GPUs that all processes of the target settle on."""
        if config.device == "cpu" or config.processes == 1 or self.pack is not pack_layers:
            return self
        return replace(self, pack=partial(pack_layers, settle=settle))


MEANS = TargetMeans()
