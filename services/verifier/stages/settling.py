"""How the processes of a target settle, before they are connected, what each of them measures: the kernels that all use.

Each tells what it has found; the verifier decides by all of it, and tells the decision. Processes that are started anew
later take the decision that stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from speculation.errors import ConfigurationError, TargetLost

JOIN_TIMEOUT = timedelta(seconds=60)
IDLE_S = 365 * 86_400.0
_POLL_S = 0.05
_FOUND, _DECISION = "kernels", "kernels chosen"

Decide = Callable[[Sequence[str]], str]


def process_name(process: int, ranks: int) -> str:
    """What errors call one of a target's processes, whose stages have so many ranks."""
    stage = f"stage {process // ranks}"
    return stage if ranks == 1 else f"rank {process % ranks} of {stage}"


def told_by(store: TCPStore, key: str, process: int, ranks: int, alive: Callable[[int], bool]) -> str:
    """What a process tells under ``key``, once it does.

    Args:
        ranks: of each stage.
        alive: whether a process still runs.

    Raises:
        ConfigurationError: it tells that it cannot serve; gives the reason.
        TargetLost: it has died.
    """
    name = process_name(process, ranks)
    while True:
        if store.check([f"ready/{process}"]) and (reason := store.get(f"ready/{process}").decode()):
            raise ConfigurationError(f"{name}: {reason}", about=name)
        if store.check([f"{key}/{process}"]):
            return store.get(f"{key}/{process}").decode()
        if not alive(process):
            raise TargetLost(f"{name} has died while it was loading; its log says why")
        time.sleep(_POLL_S)


def settle(store: TCPStore, size: int, ranks: int, alive: Callable[[int], bool], own: str, decide: Decide) -> str:
    """The verifier's side: what ``decide`` makes of what all ``size`` processes have found, this one last.

    Raises:
        ConfigurationError, TargetLost: see ``told_by``.
    """
    try:
        found = [told_by(store, _FOUND, process, ranks, alive) for process in range(size - 1)]
        decision = decide([*found, own])
        keep_settled(store, decision)
    except RuntimeError as error:
        raise TargetLost("a stage has died while the stages settled their kernels") from error
    return decision


def keep_settled(store: TCPStore, decision: str) -> None:
    """Tell a decision: also one that stands since before these processes were started."""
    store.set(_DECISION, decision)


def follow(host: str, port: int, process: int, own: str, decide: Decide) -> str:
    """The other processes' side. The verifier decides, not ``decide``.

    Raises:
        TargetLost: the verifier cannot be reached.
    """
    try:
        store = TCPStore(host, port, None, False, JOIN_TIMEOUT)
        store.set(f"{_FOUND}/{process}", own)
        store.wait([_DECISION], timedelta(seconds=IDLE_S))
        return store.get(_DECISION).decode()
    except RuntimeError as error:
        raise TargetLost(f"no verifier at {host}:{port}") from error
