"""The one answer of all verifiers to a step that they take together, such as new weights. Refuses answers that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, Unavailable


def same_weights(answers: Sequence[str | BaseException]) -> str:
    """The one answer of all to a step of a reload.

    Raises:
        OutriderError: a verifier could not take the step, none answers, or they have read different weights.
    """
    return _same(
        answers,
        lambda found: ConfigurationError(
            f"the verifiers do not see the same weights in that folder (their checksums begin with "
            f"{', '.join(each[:12] for each in found)}): all of them must reach the same files",
            about="folder",
        ),
    )


def same_adapter(order: AdapterOrder, answers: Sequence[str | BaseException]) -> str:
    """The one answer of all to a step of loading or unloading an adapter.

    Raises:
        OutriderError: as ``same_weights``, for adapters.
    """
    return _same(
        answers,
        lambda found: ConfigurationError(
            "the verifiers read different adapters there: all of them must reach the same files",
            field="lora_path",
            value=order.folder,
        ),
    )


def _same(answers: Sequence[str | BaseException], differ: Callable[[Sequence[str]], ConfigurationError]) -> str:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    found = sorted({answer for answer in answers if isinstance(answer, str)})
    if not found:
        raise Unavailable("no verifier answers; try again")
    if len(found) > 1:
        raise differ(found)
    return found[0]
