"""How logits are read: by numpy in place on a host, and on a device by its functions, where waiting costs most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.verifier.choosing.greatest import first_of_greatest


def on_host(logits: torch.Tensor) -> bool:
    """Whether numpy can read the logits in place. On a device, work is cheap but waiting for each result is not."""
    return logits.device.type == "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsReader:
    """Says where logits lie, and finds the greatest there.

    Attributes:
        on_host, first_of_greatest: see the functions of these names.
    """

    on_host: Callable[[torch.Tensor], bool] = on_host
    first_of_greatest: Callable[[torch.Tensor], torch.Tensor] = first_of_greatest

    def likeliest_of(self, logits: torch.Tensor) -> list[int]:
        """As ``first_of_greatest``, on the host."""
        found: list[int] = self.first_of_greatest(logits).tolist()
        return found


READER = LogitsReader()
