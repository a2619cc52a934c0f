"""Lets kernels compute whole decoder layers, each tried on a layer before it takes its place.

A layer is judged by a test, not by its class. Its parts must have the usual names, and in a trial pass the kernel must
compute the same as the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from services.model_files.weights.rounded_inputs import unrounded
from services.verifier.attention.calls import Call, Calls, Running, answering

# Runs the model over a few rows and returns the pass in which it ran.
TrialPass = Callable[[], Running]
# A layer's ``forward``; made from the layer. Raises ValueError if it is of another kind; says what differs.
Forward = Callable[..., torch.Tensor]
MakeForward = Callable[[nn.Module], Forward]
# Arguments of a layer that a kernel does not need: the pass knows positions and masks.
_IGNORED = {"attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "cache_position"}


@dataclass(kw_only=True, slots=True)
class Trial:
    """What a layer received in a trial pass, and its output."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    made: torch.Tensor


def fuse(layers: nn.ModuleList, make: MakeForward, trial_pass: TrialPass, tolerance: float) -> tuple[int, str]:
    """Let a kernel compute all layers that it can.

    Args:
        make: the kernel for a layer.
        trial_pass: runs the model once, so that each layer can be compared with the kernel.
        tolerance: largest difference, relative to a layer's largest number.

    Returns:
        The number of layers that it computes, and why it does not compute the first of the others.
    """
    reason = ""
    done = 0
    # Rounding would make a last bit as large as a step from code to code.
    with unrounded(layers):
        trials, running = _watched(layers, trial_pass)
        for layer, trial in zip(layers, trials, strict=True):
            try:
                with answering(running):
                    fused = _tried(make, layer, trial, tolerance)
            except (ValueError, NotImplementedError) as error:
                reason = reason or str(error)
                continue
            layer.forward = fused
            done += 1
    return done, reason


def _tried(make: MakeForward, layer: nn.Module, trial: Trial | None, tolerance: float) -> Forward:
    if trial is None:
        raise ValueError("it makes more than hidden states")
    if len(trial.given) != 1 or not {"position_embeddings"} <= trial.named.keys() <= {"position_embeddings"} | _IGNORED:
        raise ValueError(f"it is given {', '.join(trial.named)}")
    fused = make(layer)
    made = fused(*trial.given, **trial.named)
    difference = float((made - trial.made).abs().max() / trial.made.abs().max())
    if not difference <= tolerance:
        raise ValueError(f"the kernel computes something else, by {difference:.2g}")
    return fused


def _watched(layers: nn.ModuleList, trial_pass: TrialPass) -> tuple[Sequence[Trial | None], Running]:
    """What each layer receives and returns in a trial pass."""
    trials: dict[int, Trial] = {}
    hooks = []

    def note(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: object) -> None:
            if isinstance(made, torch.Tensor):
                # Later layers may overwrite their inputs.
                kept = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in given)
                trials[number] = Trial(given=kept, named=named, made=made.clone())

        return hook

    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(note(number), with_kwargs=True))
    try:
        running = trial_pass()
    finally:
        for hook in hooks:
            hook.remove()
    return [trials.get(number) for number in range(len(layers))], running


def only_call(layer: nn.Module, calls: Calls) -> Call:
    """The layer's attention call, which must be the only one and belong to ``self_attn``.

    Raises:
        ValueError: it is not.
    """
    own = [call for module in layer.modules() for call in calls.get(module, ())]
    if len(own) != 1 or calls.get(part_of(layer, "self_attn")) != tuple(own):
        raise ValueError("it does not call attention exactly once")
    return own[0]


def part_of(module: nn.Module, name: str) -> nn.Module:
    """A child.

    Raises:
        ValueError: there is none of this name.
    """
    part = getattr(module, name, None)
    if not isinstance(part, nn.Module):
        raise ValueError(f"it has no {name}")
    return part
