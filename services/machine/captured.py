"""CUDA graphs: capturing what is launched often, and what happens where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

_WARM_UP = 2
Result = TypeVar("Result")


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Launch all of it, over what its tensors hold now."""
        ...


# As ``captured``.
Capture = Callable[[Callable[[], Result]], tuple[Graph, Result]]


class Capturing(Generic[Result]):
    """Captures passes of one kind. Where that fails, but for want of memory, this one and the next ones are launched.

    Args:
        capture: as ``captured``; None: nothing is captured.
        what: the passes, as the log and the error call them.
        required: the kernels that the settings name, with which passes that cannot be captured are refused; empty: launched.
    """

    def __init__(self, capture: Capture[Result] | None, what: str, required: str = "") -> None:
        # None as well once capturing has failed.
        self._capture = capture
        self._what, self._required = what, required

    @property
    def on(self) -> bool:
        """Whether anything is captured."""
        return self._capture is not None

    def of(
        self, run: Callable[[], Result], trial: Callable[[Graph, Result], None] = lambda graph, made: None
    ) -> tuple[Graph, Result] | None:
        """The graph of what ``run`` launches, and what each replay makes anew; None: it must be launched.

        Args:
            trial: replays the graph; raises if it is not what was launched.

        Raises:
            ConfigurationError: graphs are required, and there is none; says what to do.
        """
        if self._capture is None:
            return None
        try:
            graph, made = self._capture(run)
            trial(graph, made)
            return graph, made
        except Exception as error:
            # Models, compilers and drivers may fail in any way: Triton's own errors are no RuntimeErrors.
            if is_memory(error):
                raise
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if self._required:
                raise ConfigurationError(
                    f"{self._what} cannot be captured, so each would take longer ({said}); use auto, without ranks, "
                    "to serve it so",
                    field="verifier.kernels",
                    value=self._required,
                ) from error
            log.warning("%s cannot be captured, so each takes longer: %s", self._what, said)
            self._capture = None
            return None


class Copies:
    """Where all passes of one kind have what they make: each overwrites it, so the largest is captured first."""

    def __init__(self) -> None:
        self._made: dict[Hashable, torch.Tensor] = {}

    def __call__(self, name: Hashable, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows to where those of this name lie; returns them there."""
        own = self._made.get(name)
        if own is None or len(own) < len(rows):
            own = self._made[name] = torch.empty_like(rows)
        return own[: len(rows)].copy_(rows)


def captured(
    run: Callable[[], Result], memory: Any = None, *, others: Literal["global", "thread_local"] = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run something until it is warm, then capture it; returns the graph, and what each replay makes anew.

    Args:
        run: what it launches must not depend on what tensors hold.
        memory: a pool that graphs share which take turns; None: the graph's own.
        others: global: no thread may do meanwhile what cannot be captured; thread_local: this one may not.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # On a stream of its own: torch's own for captures belongs to the GPU of the first one in this process.
    with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode=others):
        made = run()
    return graph, made


def is_memory(error: BaseException | None) -> bool:
    """Whether memory did not suffice, which CUDA and Triton say in other errors than torch's own, as well.

    The end of a capture that has failed raises an error of its own, whose context is the first.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
