"""llama.cpp through llama-cpp-python, on a GGUF file. One request at a time: its Python binding has no batching."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp


class Peer:
    """A GGUF file, loaded."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._model = llama_cpp.Llama(
            model_path=spec["gguf"],
            n_ctx=spec["max_model_len"],
            n_threads=spec["threads"],
            n_threads_batch=spec["threads"],
            n_gpu_layers=0 if spec["device"] == "cpu" else -1,
            verbose=False,
        )
        self._eos = {self._model.token_eos()} | set(spec["eos_token_ids"])

    def versions(self) -> dict[str, str]:
        """What runs."""
        return {"llama-cpp-python": llama_cpp.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer one request after the other."""
        start = time.perf_counter()
        answers = [self._answer(request, load) for request in load["requests"]]
        return {"answers": answers, "wall_s": time.perf_counter() - start}

    def _answer(self, request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
        # Its prefix match against the last request would be a cache that no other contestant has.
        self._model.reset()
        if load["temperature"] > 0:
            self._model.set_seed(request["seed"] % 2**32)
        start = time.perf_counter()
        tokens: list[int] = []
        arrivals = []
        # Everything but the temperature is switched off: its defaults would cut the distribution.
        for token in self._model.generate(
            request["prompt"], temp=load["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            tokens.append(int(token))
            arrivals.append((time.perf_counter() - start, 1))
            if token in self._eos or len(tokens) == load["max_tokens"]:
                break
        return {"tokens": tokens, "arrivals": arrivals}

    def close(self) -> None:
        """Free the model."""
        self._model.close()
