"""AdamW, and Muon for matrices, with a schedule that is a function of the step and a state of plain tensors.

Muon (Jordan et al. 2024; scaled as in Moonlight, arXiv 2502.16982, section 2.2): a matrix moves along the nearest
semi-orthogonal matrix to its momentum, so that all directions learn alike.
By hand: torch.optim.Muon always computes in bfloat16, which is ten times slower on processors without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from training.recipe import RecipeBase

_MOMENTUM = 0.95
# Coefficients of Muon's odd polynomial, how often it is applied, and the root mean square of AdamW's usual steps.
# Of ``scaled_rates``.
_LEAST_SIZE = 0.1
_QUINTIC, _ITERATIONS, _LIKE_ADAMW = (3.4445, -4.7750, 2.0315), 4, 0.2


class Optimizer:
    """AdamW over named parameters; over their matrices Muon, if the recipe gives it a learning rate.

    Args:
        parameters: float32.
        tokens: size of the draft vocabulary. AdamW trains matrices with a row for each token, as Muon's authors have it:
            few of these rows are met in a step, and the iteration over all of them takes seconds. None: there are none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: RecipeBase, tokens: int | None = None) -> None:
        self._parameters = dict(parameters)
        self._recipe = recipe
        # Of the iteration's products, as of all others: a direction 1 % off teaches as well.
        self._dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        # Momentum of the matrices that Muon trains.
        self._momentum = {
            name: torch.zeros_like(each)
            for name, each in self._parameters.items()
            if recipe.muon_rate is not None and each.dim() == 2 and (tokens is None or len(each) < tokens)
        }
        others = [each for name, each in self._parameters.items() if name not in self._momentum]
        # torch refuses no parameters, but takes an empty group of them.
        groups: list[list[nn.Parameter]] = [[each] for each in others] if recipe.scaled_rates else [others]
        self._adam = torch.optim.AdamW(
            [{"params": group} for group in groups or [[]]],
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0: linear warm-up, then a cosine down to 0."""
        return self._recipe.learning_rate * self._share(step)

    def _share(self, step: int) -> float:
        recipe = self._recipe
        warm = max(1, round(recipe.warmup * recipe.steps))
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, recipe.steps - warm)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

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
            group["lr"] = self.rate(step) * (_size(group["params"][0]) if recipe.scaled_rates and group["params"] else 1.0)
        self._adam.step()
        self._move_matrices(self._share(step))
        for parameter in parameters:
            parameter.grad = None
        return float(norm)

    @torch.no_grad()
    def _move_matrices(self, share: float) -> None:
        rate = (self._recipe.muon_rate or 0.0) * share
        for name, momentum in self._momentum.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                continue
            momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
            moved = orthogonal(torch.lerp(parameter.grad, momentum, _MOMENTUM).to(self._dtype)).float()
            parameter.mul_(1 - rate * self._recipe.weight_decay)
            parameter.add_(moved, alpha=-rate * _LIKE_ADAMW * math.sqrt(max(parameter.shape)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its state, by name of the parameter; parameters that never had a gradient have none."""
        found = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                found[f"{key}:{name}"] = value
        return found | {f"momentum:{name}": value for name, value in self._momentum.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a state that ``tensors`` gave."""
        for full, value in tensors.items():
            key, _, name = full.partition(":")
            parameter = self._parameters[name]
            if key == "momentum":
                self._momentum[name].copy_(value)
                continue
            # The count of steps, too: fused steps read it where the parameter is.
            self._adam.state[parameter][key] = value.to(parameter.device)


def _size(parameter: torch.Tensor) -> float:
    """Its root mean square; what begins as zero must move, too."""
    return max(_LEAST_SIZE, float(parameter.detach().square().mean().sqrt()))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T, by Newton and Schulz' iteration: singular values near 1."""
    linear, cubic, quintic = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    found: torch.Tensor = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        product = found @ found.T
        found = linear * found + (cubic * product + quintic * product @ product) @ found
    return found.T if tall else found
