"""LoRA adapters, by the names under which requests ask for them, and how they come and go."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from speculation.errors import InvalidArgument

_NAME = re.compile(r"[\w.:@/+-]{1,128}", re.ASCII)


def check_name(name: str, taken: Collection[str] = ()) -> None:
    """Check the name of an adapter.

    Args:
        taken: names of the model itself.

    Raises:
        InvalidArgument: it is none; says what is allowed.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument("lora_name", name, "1 to 128 letters, digits and characters of ._-:@/+")
    if name in taken:
        raise InvalidArgument("lora_name", name, "no name of the model itself")


AdapterStep = Literal["load", "undo", "close", "open", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOrder:
    """A step of loading or unloading an adapter at all verifiers of a service together.

    Attributes:
        order_id: what the steps of one change have in common.
        step: load: read it from ``folder``; undo: drop it where this change has loaded it; close: begin no more answers with
            it, and wait until those under way have ended; open: take that back; drop: unload it.
        folder: at the verifiers; empty where nothing is read.
        within_s: seconds within which answers under way must end.
    """

    order_id: str
    step: AdapterStep
    name: str
    folder: str = ""
    within_s: float = 60.0
