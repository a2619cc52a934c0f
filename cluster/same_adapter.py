"""What all verifiers of a service have answered to a step of loading or unloading an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError


def same_adapter(order: AdapterOrder, answers: Sequence[str | BaseException]) -> str:
    """The one answer of all.

    Raises:
        OutriderError: a verifier could not take the step, or they have read different adapters.
    """
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    found = sorted({answer for answer in answers if isinstance(answer, str)})
    if len(found) > 1:
        raise ConfigurationError(
            "the verifiers read different adapters there: all of them must reach the same files",
            field="lora_path",
            value=order.folder,
        )
    return found[0]
