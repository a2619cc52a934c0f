"""How many threads torch uses for what one thread computes, whatever it uses for others."""

from __future__ import annotations

import threading

import torch


def use_threads(count: int) -> None:
    """Let torch use ``count`` threads for what the calling thread computes.

    ``torch.set_num_threads`` sets the calling thread's number, and the one that threads begin with. The latter is put back,
    so a target in this process keeps its threads. (Two teams of threads on the same cores slow each other down several
    times, so a small model beside a target does best alone.)
    """
    others = torch.get_num_threads()
    torch.set_num_threads(count)
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()
