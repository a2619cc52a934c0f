"""LoRA adapters, by the names under which requests ask for them."""

from __future__ import annotations

import re
from collections.abc import Collection

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
