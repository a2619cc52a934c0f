"""What the drafters of a verifier hold that its requests can use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from services.verifier.engine.origins import Origin
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.held_models import OTHER_NAME, DrafterCard, HeldModel

log = logging.getLogger(__name__)

_UNO = "uno"


class RegisteredModels:
    """The models of all origins. What a drafter tells may be wrong; it must not fail the requests that use its models.

    Args:
        origins: in their order; those of the settings count before those of a drafter.
        check_layers: see ``Target.check_layers``.
        tokenizer: digest of the target's tokenizer; empty: not known.
        drafts_itself: whether the target's passes can hold noise by which it drafts.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        check_layers: Callable[[Sequence[int]], None],
        tokenizer: str,
        drafts_itself: bool,
    ) -> None:
        # The settings' own first.
        self._origins = sorted(origins, key=lambda origin: origin.models is None)
        self._check_layers = check_layers
        self._tokenizer = tokenizer
        self._drafts_itself = drafts_itself
        self._told: list[DrafterCard | None] = []
        self._held: tuple[HeldModel, ...] | None = None

    @property
    def held(self) -> tuple[HeldModel, ...] | None:
        """The models now; None: those of the settings, since a drafter has told nothing."""
        if (told := [origin.card for origin in self._origins]) != self._told:
            self._told, self._held = told, self._joined(told)
        return self._held

    def _joined(self, told: Sequence[DrafterCard | None]) -> tuple[HeldModel, ...] | None:
        found: dict[str, HeldModel] = {}
        for origin, card in zip(self._origins, told, strict=True):
            if card is None:
                return None
            for model in card.held:
                try:
                    if origin.models is None:
                        self._check(model, card, found)
                except (ConfigurationError, InvalidArgument) as error:
                    log.warning("%s: its model %s is not used: %s", origin.name, model.called, error)
                else:
                    found[model.called] = model
        return tuple(found.values())

    def _check(self, model: HeldModel, card: DrafterCard, others: dict[str, HeldModel]) -> None:
        """Check a model that a drafter has told of.

        Raises:
            ConfigurationError: it was made for another target, needs what this verifier lacks, or is called like another.
            InvalidArgument: the target has no such layer.
        """
        if self._tokenizer and card.tokenizer and card.tokenizer != self._tokenizer:
            raise ConfigurationError(
                "name the same model on both sides", field="model", value=card.target, given="which has another tokenizer"
            )
        if model.called in others:
            raise ConfigurationError(field="name", value=repr(model.called), allowed=OTHER_NAME)
        if model.kind == _UNO and not self._drafts_itself:
            raise ConfigurationError(
                "the verifier's settings must name it, too", field="drafter.models", verb="names", value="no uno"
            )
        self._check_layers(model.layers)
        layers = {layer for each in (*others.values(), model) for layer in each.layers}
        if len(layers) > limits.MAX_LAYERS:
            raise InvalidArgument("layers", f"{len(layers)} of all models", f"at most {limits.MAX_LAYERS}")
