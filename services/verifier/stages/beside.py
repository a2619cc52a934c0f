"""What the verifier asks the other processes of its target beside passes, which go on meanwhile: to read files.

What is told is text, and takes as long as files take, so it goes through the store where the processes have met. Each
question has a number, and every process answers it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from services.verifier.stages.long_values import get_long, set_long
from services.verifier.stages.settling import process_name
from speculation.errors import OutriderError, TargetLost

log = logging.getLogger(__name__)

_JOIN_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.02
# How often a process looks whether it is asked, and how long its end waits for what it is reading.
_LISTEN_S, _PATIENCE_S = 0.1, 1.0

# Does what is told in a question of that number, which names a ``folder``; returns the answer.
Answer = Callable[[int, Mapping[str, str]], str]


class Asking:
    """The verifier's side. May be used in any thread.

    Args:
        others: the processes of the target but for this one.
        alive: whether a process still runs, and is to.
        ranks: of each stage.
    """

    def __init__(self, store: TCPStore, others: range, alive: Callable[[int], bool], ranks: int = 1) -> None:
        self.store, self.others = store, others
        self._alive, self._ranks = alive, ranks
        self._last, self._lock = 0, threading.Lock()

    def tell(self, kind: str, *, folder: str, **told: str) -> int:
        """Ask all to read a folder; returns the question's number.

        Raises:
            TargetLost: a process has died.
        """
        with self._lock:
            self._last += 1
            number = self._last
            try:
                self.store.set(f"asked/{number}", json.dumps({"kind": kind, "folder": folder, **told}))
            except RuntimeError as error:
                raise TargetLost(f"a stage has died before it was asked for {kind}") from error
        return number

    def answers(self, number: int, doing: str) -> dict[str, str]:
        """What all have answered, by what errors call them. All are waited for, so that none begins to read what it has been
        told to drop.

        Args:
            doing: what they do meanwhile, for errors.

        Raises:
            TargetLost: one has died.
        """
        try:
            return {process_name(process, self._ranks): self._answer(number, process, doing) for process in self.others}
        except RuntimeError as error:
            raise TargetLost(f"a stage has died while it was {doing}") from error

    def _answer(self, number: int, process: int, doing: str) -> str:
        key = f"asked/{number}/{process}"
        while not self.store.check([key]):
            if not self._alive(process):
                raise TargetLost(f"{process_name(process, self._ranks)} has died while it was {doing}")
            time.sleep(_POLL_S)
        return get_long(self.store, key)


class Listening:
    """The side of another process: it answers in threads beside that of the passes.

    Made before the process says that it is ready.

    Args:
        process: its number among the target's.

    Raises:
        TargetLost: the verifier cannot be reached.
    """

    def __init__(self, host: str, port: int, process: int) -> None:
        self._process, self._answers = process, dict[str, Answer]()
        self._ended = threading.Event()
        self._listener = threading.Thread(target=self._follow, name="asked", daemon=True)
        try:
            self.store = TCPStore(host, port, None, False, _JOIN_TIMEOUT)
        except RuntimeError as error:
            raise TargetLost(f"no verifier at {host}:{port}") from error

    def answer(self, kind: str, how: Answer) -> None:
        """Answer questions of a kind from now on. What ``how`` raises of ours is the answer."""
        self._answers[kind] = how

    def start(self) -> None:
        """Begin to listen."""
        self._listener.start()

    def stop(self) -> None:
        """Listen no more."""
        self._ended.set()
        if self._listener.is_alive():
            self._listener.join(_PATIENCE_S)

    def _follow(self) -> None:
        try:
            for number in count(1):
                if not (question := self._awaited(f"asked/{number}")):
                    return
                told = json.loads(question)
                set_long(self.store, f"asked/{number}/{self._process}", self._answered(told.pop("kind"), number, told))
        except RuntimeError:
            # The process's own thread notices that as well, and says so.
            log.debug("process %d is asked nothing any more", self._process, exc_info=True)

    def _answered(self, kind: str, number: int, told: Mapping[str, str]) -> str:
        try:
            # A thread for each, since torch's threads in it go with it. Where none can be started, that is the answer.
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{kind} of stage {self._process}") as reader:
                return reader.submit(self._answers[kind], number, told).result()
        except OutriderError as error:
            return refusal(str(error))
        except Exception as error:
            log.exception("process %d cannot load the %s at %s", self._process, kind, told["folder"])
            return refusal(f"cannot load the {kind} at {told['folder']}: {type(error).__name__}: {error}")

    def _awaited(self, key: str) -> str:
        """What is written there, once it is; empty: nothing until the end.

        Asked for again and again: a thread that waits within torch would outlive the interpreter's end, and abort it.
        """
        while not self._ended.wait(_LISTEN_S):
            if self.store.check([key]):
                found: str = self.store.get(key).decode()
                return found
        return ""


_REFUSED = "refused: "


def refusal(why: str) -> str:
    """The answer of a process that cannot do what it was told."""
    return f"{_REFUSED}{why}"


def refused(answer: str) -> str | None:
    """Why a process cannot do what it was told; None: it has."""
    return answer.removeprefix(_REFUSED) if answer.startswith(_REFUSED) else None
