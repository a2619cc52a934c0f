"""Weights that take the place of those of a target, number by number, where the old ones lie.

Kernels, fused layers and drafters hold addresses of weights. So the new ones are loaded and packed beside them, exactly as
the old ones were, and then exchanged: what was computed of the old ones' places stays valid, and a second exchange is the
way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from services.machine.processor import free_memory
from services.model_files.folder import weights_digest
from services.model_files.weights.rounded_inputs import roundings_of
from services.model_files.weights.stored_form import stored_form
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.exact_weights import ExactWeight
from services.verifier.loading import adapters
from services.verifier.loading.load_model import load_beside, load_layers_beside, split_layers
from services.verifier.model.means import TargetMeans
from services.verifier.recurrence import functions
from services.verifier.stages.same_weights import FilesRead
from services.verifier.stages.stage_ranks import StageRanks
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.verifier.model.slice import ModelSlice


class NewWeights:
    """A second set of weights for a served model.

    Args:
        config: the target's, with the folder of the new weights.
        served: the model whose weights they are to replace.
        choice: what computes its linear layers.
        load: loads them, as the served model was; None: all of them.
        told: the ``files_told`` of the folder; empty where nobody is told of it.
        hashed: whether anybody asks for the digest.
        copies: as many processes of this machine read as much.

    Raises:
        ConfigurationError: there is no memory for them, they cannot be loaded, have changed meanwhile, or are held
            otherwise than those that serve.

    Attributes:
        config: as given.
        digest: of every byte of them; empty: nobody asks for it.
        stored: as in ``ServedWeights``.
        idle: the folder of the weights that do not serve, and the files in it.
    """

    def __init__(
        self,
        config: TargetConfig,
        served: PreTrainedModel,
        choice: Choice,
        means: TargetMeans,
        load: Callable[[TargetConfig], PreTrainedModel] | None = None,
        told: str = "",
        *,
        hashed: bool = True,
        copies: int = 1,
    ) -> None:
        self.config = config
        _check_room(served, copies)
        folder = Path(config.model_path)
        written = _written(folder)
        self.digest, self.stored = weights_digest(folder) if hashed else "", stored_form(folder)
        self.idle = config.model_path, FilesRead(told=told, digest=self.digest)
        model = (load or load_beside)(config)
        if roundings_of(model) != roundings_of(served):
            raise ConfigurationError(
                f"cannot replace weights by those in {folder}: its layers round what enters them otherwise "
                "(input_activations)",
                about=folder,
            )
        model.eval().requires_grad_(False)
        adapters.install(model, 1, torch.device(config.device))
        functions.install(model)
        means.pack(model, _by(choice, config))
        if _written(folder) != written:
            raise ConfigurationError(
                f"the files in {folder} have changed while they were read: name the folder once they are complete",
                about=folder,
            )
        self._pairs = list(_pairs(served, model, folder))

    @torch.inference_mode()
    def exchange(self) -> None:
        """Exchange them with those that serve. No pass may be under way."""
        done: list[_Pair] = []
        try:
            for pair in self._pairs:
                pair.exchange()
                done.append(pair)
        except BaseException:
            # Want of memory; those that serve stay what they were.
            for pair in done:
                pair.exchange()
            raise

    def drop(self) -> None:
        """Give their memory back, which takes a moment for each gigabyte: in a thread where nobody waits. They are of no use
        any more.
        """
        # One by one: other threads run between two of them.
        while self._pairs:
            self._pairs.pop()


def weights_of_part(
    config: TargetConfig,
    part: ModelSlice,
    stage: int,
    means: TargetMeans,
    folder: Path,
    told: str = "",
    *,
    hashed: bool = True,
    copies: int = 1,
) -> NewWeights:
    """A second set of the weights of a stage, or of a rank of it, from another folder.

    Args:
        config: the part's.
        told, hashed, copies: as in ``NewWeights``.

    Raises:
        ConfigurationError: see there.
    """
    load = None
    if config.processes > 1:
        # Of its own: nothing of this set is exchanged with other ranks while it is made.
        shards = None if part.shards is None else StageRanks(part.shards.index, part.shards.count)
        load = partial(load_layers_beside, layers=split_layers(config)[stage], shards=shards)
    wanted = replace(config, model_path=str(folder))
    return NewWeights(wanted, part.model, part.choice, means, load, told, hashed=hashed, copies=copies)


def _check_room(served: nn.Module, copies: int) -> None:
    # What is shared is held once.
    needed = copies * sum(_bytes_of(held) for held in {_key(held): held for _, (_, held) in _held(served)}.values())
    if needed > (free := free_memory()):
        raise ConfigurationError(
            f"there is no room for a second copy of the weights, which takes {needed / 2**30:.1f} GiB: "
            f"{free / 2**30:.1f} GiB are free",
            about="memory",
        )


def _bytes_of(held: torch.Tensor) -> int:
    if isinstance(held, ExactWeight) and held.numbers.packed:
        return sum(_bytes_of(own) for matrix in held.numbers.packed for _, (_, own) in _held(matrix))
    return held.numel() * held.element_size()


def _written(folder: Path) -> dict[str, tuple[int, int]]:
    """Size of each file and when it was last written."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir()}


def _by(choice: Choice, config: TargetConfig) -> TargetConfig:
    """Settings by which the same kernels are chosen again, without measuring."""
    if choice.linears == "native":
        held = "as_stored" if choice.weights == "as_stored" else "float32"
        return replace(config, kernels=choice.instructions, weights=held)  # type: ignore[arg-type]
    return replace(config, kernels=choice.linears, weights="float32")  # type: ignore[arg-type]


@dataclass(slots=True)
class _Pair:
    """An attribute of a served module that holds numbers, and what is to take their place."""

    module: nn.Module
    name: str
    new: torch.Tensor

    def exchange(self) -> None:
        own: torch.Tensor = getattr(self.module, self.name)
        if isinstance(own, ExactWeight):
            own.numbers.exchange(self.new.numbers)  # type: ignore[attr-defined]
        elif own.layout == torch.strided:
            kept = own.clone()
            own.copy_(self.new)
            self.new = kept
        else:
            # Of oneDNN's layout, whose numbers have no address that others know.
            setattr(self.module, self.name, self.new)
            self.new = own


def _pairs(served: PreTrainedModel, model: PreTrainedModel, folder: Path) -> Iterator[_Pair]:
    """Everything that holds numbers of weights in both models, which are made alike."""
    ours, theirs = dict(_held(served)), dict(_held(model))
    seen: set[int] = set()
    for name in sorted(ours.keys() | theirs.keys()):
        (module, own), (_, new) = ours.get(name, (None, None)), theirs.get(name, (None, None))
        if module is None or own is None or new is None or _form(own) != _form(new):
            raise ConfigurationError(
                f"cannot replace weights by those in {folder}: {name} would be held as {_form(new)}, and serves as "
                f"{_form(own)}: store it in the same type, or serve with verifier.weights: float32",
                about=folder,
            )
        # Numbers that are shared are exchanged once: the second time they would be lost, or come back. Tensors themselves
        # take each other's place wherever they are.
        key = _key(own)
        if key in seen and own.layout == torch.strided:
            continue
        seen.add(key)
        if isinstance(own, ExactWeight):
            new.numbers.pack_as(own.numbers)  # type: ignore[attr-defined]
        elif isinstance(new, nn.Parameter):
            # Not the file itself, which may be written again before they are exchanged.
            new = new.detach().clone()
        yield _Pair(module, name.rpartition(".")[2], new)


def _held(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, torch.Tensor]]]:
    """Modules and their weights, by name; what is computed from the configuration is left out."""
    for place, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor) and name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", (module, value)


def _key(held: torch.Tensor) -> int:
    if isinstance(held, ExactWeight):
        return id(held.numbers)
    return held.data_ptr() if held.layout == torch.strided else id(held)


def _form(held: torch.Tensor | None) -> str:
    return "nothing" if held is None else f"{str(held.dtype).removeprefix('torch.')} {list(held.shape)}"
