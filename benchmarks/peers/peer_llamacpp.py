"""llama.cpp's server, through xllamacpp: continuous batching over slots, on a GGUF file.

It is called over HTTP, as its users do: xllamacpp's calls within the process return text but no token ids.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

# Stands for a token that ends within a character: the server counts it but never streams its id.
_UNKNOWN = -1
# The room of a slot grows in steps of this size, so that a longer prompt rarely restarts the server.
_ROOM = 1024
_WARNINGS = 2


class Peer:
    """A GGUF file behind a server with one slot per concurrent request; see ``worker.py`` for the interface."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._server: Any = None
        self._slots = self._room = 0
        self._serve(1, _ROOM)

    def versions(self) -> dict[str, str]:
        """Also names the instruction sets it was compiled for: the wheels on PyPI leave out the newest."""
        words = xllamacpp.get_system_info().replace("|", " ").replace(" = ", "=").split()
        built_for = "/".join(word.removesuffix("=1") for word in words if word.endswith("=1"))
        return {"xllamacpp": xllamacpp.__version__, "built for": built_for}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer ``concurrency`` requests at a time, with continuous batching."""
        at_once = load["concurrency"]
        self._serve(at_once, max(len(request["prompt"]) for request in load["requests"]) + load["max_tokens"])
        with ThreadPoolExecutor(at_once) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda request: self._answer(request, load), load["requests"]))
            wall_s = time.perf_counter() - start
        return {"answers": answers, "wall_s": wall_s}

    def close(self) -> None:
        """Stop the server and free the model."""
        self._server = None

    def _serve(self, slots: int, room: int) -> None:
        """Make sure that a server with this many slots runs, each with room for ``room`` tokens."""
        if self._server is not None and slots == self._slots and room <= self._room:
            return
        # Two models might not fit into memory.
        self.close()
        self._slots, self._room = slots, -(-room // _ROOM) * _ROOM
        params = xllamacpp.CommonParams()
        params.model.path = self._spec["gguf"]
        params.n_parallel = slots
        params.n_ctx = slots * self._room
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._spec["threads"]
        params.n_gpu_layers = 0 if self._spec["device"] == "cpu" else -1
        # Repeats send the same prompts; a prefix cache would answer them from the last repeat.
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = _WARNINGS
        self._server = xllamacpp.Server(params)

    def _answer(self, request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        tokens: list[int] = []
        arrivals = []
        for chunk in self._stream(_body(request, load)):
            so_far = chunk["tokens_predicted"] if chunk["stop"] else chunk["timings"]["predicted_n"]
            if new := so_far - len(tokens):
                known = chunk["tokens"][-new:]
                tokens += [_UNKNOWN] * (new - len(known)) + known
                arrivals.append((time.perf_counter() - start, new))
        return {"tokens": tokens, "arrivals": arrivals}

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The server's events as they arrive.

        Raises:
            RuntimeError: the server refuses or breaks off.
        """
        connection = http.client.HTTPConnection(self._server.listening_address.removeprefix("http://"))
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise RuntimeError(f"the server says {reply.status}: {reply.read(300).decode(errors='replace')}")
            for line in reply:
                kind, _, data = line.partition(b": ")
                # Other lines separate events or keep the connection alive.
                if kind in (b"data", b"error"):
                    chunk = json.loads(data)
                    if kind == b"error" or "error" in chunk:
                        raise RuntimeError(f"the server broke off: {chunk}")
                    yield chunk
        finally:
            connection.close()


def _body(request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
    """Names the only sampler to use: the default ones would truncate the distribution."""
    greedy = load["temperature"] == 0
    return {
        "prompt": request["prompt"],
        "n_predict": load["max_tokens"],
        # top_k = 1 is the fastest way to decode greedily.
        "samplers": ["top_k"] if greedy else ["temperature"],
        "top_k": 1,
        "temperature": load["temperature"],
        "seed": request["seed"] % 2**32,
        "ignore_eos": False,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
        "timings_per_token": True,
    }
