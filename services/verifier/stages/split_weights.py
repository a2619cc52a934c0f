"""New weights of a target in several processes: how the verifier has them read by all stages and ranks, or by none, and how
all change to them between the same two passes.

Each process reads its own slices of the folder, when it is asked to (``beside``), and holds them beside those that serve, as
long as the verifier does. An order to exchange them comes before the next pass. Every pass is told by which version it is to
be computed: a process that has not changed notices, and the target is rebuilt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize

from services.verifier.stages.beside import Asking, Listening, refused
from services.verifier.stages.same_weights import OwnFiles, read_as_told
from speculation.errors import ConfigurationError, TargetLost

_KIND = "weights"


class Read(Protocol):
    """Weights beside those that serve."""

    def exchange(self) -> None:
        """Exchange them with those that serve."""
        ...

    def drop(self) -> None:
        """Give their memory back."""
        ...


R = TypeVar("R", bound=Read)
# Reads the slices of a process from a folder.
ReadOwn = Callable[[Path], Read]


class Version:
    """By which weights a process computes: 0 are the first ones, and others have the number of the question to read them.

    Attributes:
        now: that version.
    """

    def __init__(self) -> None:
        self.now = 0
        self._others: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Know of weights that are held beside those that serve."""
        self._others[number] = number

    def exchange(self, number: int) -> None:
        """Compute by those; the same again is the way back."""
        self.now, self._others[number] = self._others[number], self.now

    def drop(self, number: int) -> None:
        """Forget what is held beside; unknown ones are fine."""
        self._others.pop(number, None)


class SplitWeights:
    """The verifier's side."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self.version = asking, Version()
        self._numbers: WeakKeyDictionary[Read, int] = WeakKeyDictionary()
        self._dropped: deque[int] = deque()

    def load(self, folder: Path, own: Callable[[str], R]) -> R:
        """Have new weights read by all, and wait for it; passes may run.

        Args:
            own: reads this process's part, given the ``files_told`` of the folder.

        Raises:
            ConfigurationError: a process cannot, or reads others; says which one and why. None keeps them.
            TargetLost: a process has died.
        """
        files = OwnFiles(folder)
        number = self._asking.tell(_KIND, folder=str(folder), files=files.told)
        complete = False
        try:
            try:
                weights = own(files.told)
            finally:
                answers = self._asking.answers(number, "reading weights")
            for process, answer in answers.items():
                if (why := refused(answer)) is not None:
                    raise ConfigurationError(f"{process}: {why}", about=process)
                files.check(process, answer)
            complete = True
        finally:
            if not complete:
                self._drop(number)
        self.version.add(number)
        self._numbers[weights] = number
        finalize(weights, self._drop, number)
        return weights

    def number_of(self, weights: Read) -> int | None:
        """By which orders name weights that all hold; None: not all do, since processes were started anew."""
        return self._numbers.get(weights)

    def to_drop(self) -> list[int]:
        """The numbers of those that are to be forgotten now, since nobody here can exchange them any more."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def _drop(self, number: int) -> None:
        self.version.drop(number)
        self._dropped.append(number)


class StageWeights:
    """The side of another process.

    Args:
        read: reads its slices.
    """

    def __init__(self, listening: Listening, read: ReadOwn) -> None:
        self._read, self._version = read, Version()
        self._held: dict[int, Read] = {}
        listening.answer(_KIND, self._load)

    def _load(self, number: int, told: Mapping[str, str]) -> str:
        folder = Path(told["folder"])
        found, read = read_as_told(folder, told["files"], partial(self._read, folder))
        self._version.add(number)
        self._held[number] = found
        return read

    def exchange(self, number: int) -> None:
        """Compute by the weights of that number from the next pass on; the same again is the way back."""
        self._held[number].exchange()
        self._version.exchange(number)

    def drop(self, number: int) -> None:
        """Forget what is held of that number; a process that could not read it holds nothing."""
        if (found := self._held.pop(number, None)) is not None:
            try:
                # No pass waits for it.
                threading.Thread(target=found.drop, name="dropped weights", daemon=True).start()
            except RuntimeError:
                # There is no room for a thread, and the process must go on.
                found.drop()
        self._version.drop(number)

    def check(self, version: int) -> None:
        """Make sure that a pass is computed by the weights that it is to be computed by.

        Raises:
            TargetLost: it is not.
        """
        if self._version.now != version:
            raise TargetLost(f"the weights are of version {self._version.now} here, of version {version} there")
