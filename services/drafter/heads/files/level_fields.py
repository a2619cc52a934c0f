"""What the configurations of streams and of Medusa's heads have in common; read without torch."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_fields import HeadFields, Shapes, refused_tensor
from services.drafter.heads.files.layouts import DRAFT_IDS, DRAFT_OFFSETS, DRAFTED


def check_tensors(shapes: Shapes, wanted: Shapes, where: str) -> None:
    """Check that a checkpoint holds all tensors that are wanted, beside those of its draft vocabulary, and no others.

    Raises:
        ConfigurationError: names the first that is missing, unknown or has another shape.
    """
    refused = partial(refused_tensor, where)
    for name, shape in wanted.items():
        if name not in shapes:
            raise refused(name, "missing")
        if shapes[name] != shape:
            raise refused(name, list(shapes[name]), allowed=f"{list(shape)}, by the target")
    for name in sorted(shapes):
        if name not in wanted and name not in (DRAFT_OFFSETS, DRAFT_IDS, DRAFTED):
            raise refused(name, "unknown", "there is no place for it")


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
