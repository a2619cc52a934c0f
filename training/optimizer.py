"""AdamW with a schedule that is a function of the step, and a state of plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from training.recipe import RecipeBase


class Optimizer:
    """AdamW over named parameters.

    Args:
        parameters: float32.
        steps: over which the learning rate falls to 0.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: RecipeBase) -> None:
        self._parameters = dict(parameters)
        self._recipe = recipe
        self._adam = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0: linear warm-up, then a cosine down to 0."""
        recipe = self._recipe
        warm = max(1, round(recipe.warmup * recipe.steps))
        if step < warm:
            return recipe.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, recipe.steps - warm)
        return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def make_step(self, step: int, count: int) -> float:
        """Clip the gradients, which are sums over ``count`` predictions, and change the parameters. Returns their norm."""
        recipe, parameters = self._recipe, list(self._parameters.values())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= max(1, count)
        if recipe.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, recipe.clip_value)
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip_norm if recipe.clip_norm is not None else math.inf)
        for group in self._adam.param_groups:
            group["lr"] = self.rate(step)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its state, by name of the parameter; parameters that never had a gradient have none."""
        found = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                found[f"{key}:{name}"] = value
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a state that ``tensors`` gave."""
        for full, value in tensors.items():
            key, _, name = full.partition(":")
            parameter = self._parameters[name]
            # Adam's count of steps stays on the CPU.
            self._adam.state[parameter][key] = value if key == "step" else value.to(parameter.device)
