"""What drafters hold <-> held_models.proto, and what a drafter tells of itself <-> drafting.proto."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.internal.v1 import drafting_pb2, held_models_pb2
from services.links.codec.checks import check_size
from services.links.codec.same_fields import SameFields
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.held_models import NAME, OTHER_NAME, DrafterCard, HeldModel, is_name
from speculation.sources import SOURCES

_MODEL = SameFields(HeldModel, held_models_pb2.HeldModel)
_CARD = SameFields(DrafterCard, drafting_pb2.DraftingServiceDescribeResponse, by_hand=("held",))
_KINDS = tuple(name for name, spec in SOURCES.items() if spec.kind == "model")


def encode_held(models: Iterable[HeldModel]) -> held_models_pb2.HeldModels:
    """The models that a drafter, or all drafters of a verifier hold."""
    return held_models_pb2.HeldModels(models=map(_MODEL.encode, models))


def decode_held(wire: held_models_pb2.HeldModels) -> tuple[HeldModel, ...]:
    """Decode such models.

    Raises:
        InvalidArgument: they are too many, one has a wrong or too large field, or two have one name.
    """
    check_size("models", len(wire.models), limits.MAX_HELD_MODELS)
    models = tuple(map(_decode_model, wire.models))
    called = [model.called for model in models]
    for number, name in enumerate(called):
        if name in called[:number]:
            raise InvalidArgument("models.name", name, OTHER_NAME)
    return models


def _decode_model(wire: held_models_pb2.HeldModel) -> HeldModel:
    if wire.kind not in _KINDS:
        raise InvalidArgument("models.kind", wire.kind or "empty", f"one of {', '.join(_KINDS)}")
    if wire.name and not is_name(wire.name):
        raise InvalidArgument("models.name", wire.name, NAME)
    check_size("models.layers", len(wire.layers), limits.MAX_LAYERS)
    check_size("models.tenants", len(wire.tenants), limits.MAX_HELD_TENANTS)
    check_size("models.tenants", max(map(len, wire.tenants), default=0), limits.MAX_TENANT_CHARACTERS)
    check_size("models.when", len(wire.when), limits.MAX_WHEN_CHARACTERS)
    return _MODEL.decode(wire)


def encode_drafter(card: DrafterCard) -> drafting_pb2.DraftingServiceDescribeResponse:
    """Drafter to verifier: what it holds."""
    return _CARD.encode(card, held=encode_held(card.held))


def decode_drafter(wire: drafting_pb2.DraftingServiceDescribeResponse) -> DrafterCard:
    """Decode what a drafter tells of itself.

    Raises:
        InvalidArgument: as ``decode_held``, or what it calls itself, its target or its tokenizer is too long.
    """
    for name in ("target", "tokenizer", "version"):
        check_size(name, len(getattr(wire, name)), limits.MAX_CARD_CHARACTERS)
    return _CARD.decode(wire, held=decode_held(wire.held))
