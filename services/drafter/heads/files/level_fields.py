"""What the configurations of streams and of Medusa's heads have in common; read without torch."""

from __future__ import annotations

from collections.abc import Collection

from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_fields import HeadFields, Shapes
from services.drafter.heads.files.layouts import DRAFT_IDS, DRAFT_OFFSETS, DRAFTED
from speculation.errors import ConfigurationError


def check_tensors(shapes: Shapes, wanted: Shapes, where: str) -> None:
    """Check that a checkpoint holds all tensors that are wanted, beside those of its draft vocabulary, and no others.

    Raises:
        ConfigurationError: names the first that is missing, unknown or has another shape.
    """
    refused = f"cannot load the head at {where}: the tensor"
    for name, shape in wanted.items():
        if name not in shapes:
            raise ConfigurationError(f"{refused} {name} is missing")
        if shapes[name] != shape:
            raise ConfigurationError(f"{refused} {name} is {list(shapes[name])}: must be {list(shape)}, by the target")
    for name in sorted(shapes):
        if name not in wanted and name not in (DRAFT_OFFSETS, DRAFT_IDS, DRAFTED):
            raise ConfigurationError(f"{refused} {name} is unknown: there is no place for it")


def check_sizes(fields: HeadFields, target: TargetShape, without: Collection[str] = ()) -> None:
    """Check the sizes of the target that a checkpoint says it was made for.

    Args:
        without: fields that mean something else here.

    Raises:
        ConfigurationError: they are another target's; names the field.
    """
    sizes = {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_hidden_layers": target.num_layers
    }  # fmt: skip
    for name, size in sizes.items():
        if name not in without and fields.number(name, size) != size:
            raise fields.refuse(name, fields.fields[name], f"{size}, the target's: it is another target's")
