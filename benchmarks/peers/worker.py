"""A contestant's own process: reads orders as JSON lines from stdin, writes replies to stdout.

It runs as a script in the peer's environment, ``python worker.py MODULE``, and needs only Python itself. MODULE is a file
beside this one with a class ``Peer``: ``Peer(spec)`` loads the model, ``versions()`` returns package versions,
``run(contestant, load)`` answers a load, and ``close()`` releases everything.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any


def main() -> None:
    """Serve orders until stdin ends."""
    _die_with_parent()
    # Libraries may print to stdout: that goes to the log, and replies use a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "load":
                # Imports leave next to no garbage, and looking for it is a fifth of their time.
                gc.disable()
                try:
                    peer = importlib.import_module(sys.argv[1]).Peer(order["spec"])
                finally:
                    gc.enable()
                reply = peer.versions()
            elif order["do"] == "logits":
                reply = peer.logits(order["tokens"], order["ids"])
            else:
                reply = peer.run(order["contestant"], order["load"])
            answers.write(json.dumps({"ok": reply}) + "\n")
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {text[0] if text else ''}"[:500]}) + "\n")
        answers.flush()
    if peer is not None:
        peer.close()


def _die_with_parent() -> None:
    """Linux only. Between orders this process is stopped with SIGSTOP and would not notice that its stdin has ended."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
