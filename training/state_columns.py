"""Which of the target's states a model learns from, and where they stand in a row of its training data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.drafter.heads.files.head_config import FINAL, TargetShape
from speculation.errors import ConfigurationError
from training.recipe import AnyRecipe, BlockRecipe, Eagle3Recipe, HeadRecipe, MedusaRecipe, StreamsRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class StateColumns:
    """The columns of a row: the states that the model reads, and the one that gives the target's next token.

    Attributes:
        inputs: layers whose states the model reads, in this order; see ``Features.layers``.
        hidden_size: of the target.
    """

    inputs: tuple[int, ...]
    hidden_size: int

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of a row, in their order."""
        return self.inputs if FINAL in self.inputs else (*self.inputs, FINAL)

    @property
    def read(self) -> slice:
        """What the model reads."""
        return slice(0, len(self.inputs) * self.hidden_size)

    @property
    def target(self) -> slice:
        """The input of the target's output layer."""
        begin = self.layers.index(FINAL) * self.hidden_size
        return slice(begin, begin + self.hidden_size)


def columns_of(recipe: AnyRecipe, shape: TargetShape) -> StateColumns:
    """What a recipe's model reads of its data. Draft models, and streams that keep none, compute states from the tokens.

    Raises:
        ConfigurationError: the target has no such layers.
    """
    inputs: tuple[int, ...] = ()
    if isinstance(recipe, HeadRecipe | MedusaRecipe):
        inputs = (FINAL,)
    elif isinstance(recipe, Eagle3Recipe | BlockRecipe):
        inputs = _inner_layers(recipe.state_layers, shape)
    elif isinstance(recipe, StreamsRecipe) and recipe.kept_states:
        inputs = (shape.num_layers - recipe.stream_layers - 1,)
    return StateColumns(inputs=inputs, hidden_size=shape.hidden_size)


def layers_of(recipes: Iterable[AnyRecipe], shape: TargetShape) -> tuple[int, ...]:
    """The layers that data need for all of some recipes, ascending, with the state behind the final norm at the end.

    Raises:
        ConfigurationError: the target has no such layers.
    """
    wanted = {layer for recipe in recipes for layer in columns_of(recipe, shape).inputs}
    return (*sorted(wanted - {FINAL}), FINAL)


def _inner_layers(wanted: tuple[int, ...] | None, shape: TargetShape) -> tuple[int, ...]:
    """``wanted``, or EAGLE-3's three layers.

    The last layer's output is refused: public layouts have no name for it but that of the state behind the final norm.
    """
    layers = shape.eagle3_layers if wanted is None else wanted
    last = shape.num_layers - 2
    if len(set(layers)) != len(layers) or not all(layer == FINAL or 0 <= layer <= last for layer in layers):
        raise ConfigurationError(
            field="the recipe's state_layers",
            verb="are",
            value=list(layers),
            allowed=f"different ones from 0 to {last}, or {FINAL} for the state behind the final norm",
        )
    return layers
