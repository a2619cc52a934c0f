"""Memory that compiled code has made, and that Python owns."""

from __future__ import annotations

from collections.abc import Callable


class Held:
    """Memory that compiled code has made, freed together with this object.

    Attributes:
        address: where it is.

    Raises:
        MemoryError: ``address`` is None: there was none.
    """

    def __init__(self, address: int | None, free: Callable[[int], None]) -> None:
        self.address = address or 0
        self._free = free
        if not self.address:
            raise MemoryError

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)
