"""vLLM's asynchronous engine: plain decoding, n-gram speculation, suffix decoding."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

_SPECULATION: dict[str, dict[str, Any]] = {
    # Values from vLLM's documentation.
    "vllm_ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "vllm_suffix": {"method": "suffix", "num_speculative_tokens": 16},
}

# vLLM's processes do not end when asked to, however long one waits; after this time they are killed.
_SHUTDOWN_TIMEOUT_S = 1.0


class Peer:
    """One engine; see ``worker.py`` for the interface.

    vLLM fixes the speculation method at start, so each method needs a process.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        on_cpu = spec["device"] == "cpu"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            # By default vLLM reserves a core for its scheduler, which costs more than it gains on a small machine.
            cores = sorted(os.sched_getaffinity(0))[: spec["threads"]]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._version = vllm.__version__
        arguments = AsyncEngineArgs(
            model=spec["model_path"],
            dtype=spec["dtype"],
            max_model_len=spec["max_model_len"],
            # Repeats send the same prompts; a prefix cache would answer them from the last repeat.
            enable_prefix_caching=False,
            disable_log_stats=True,
            # On the CPU nothing is compiled, but preparing for it takes two minutes.
            enforce_eager=on_cpu,
            speculative_config=_SPECULATION.get(spec["contestant"]),
        )
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(self._start(AsyncLLM, arguments))
        self._asked = 0

    @staticmethod
    async def _start(engine: Any, arguments: Any) -> Any:
        return engine.from_engine_args(arguments)

    def versions(self) -> dict[str, str]:
        import torch

        return {"vllm": self._version, "torch": torch.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer ``concurrency`` requests at a time, with continuous batching."""
        return self._runner.run(self._run(load))

    async def _run(self, load: dict[str, Any]) -> dict[str, Any]:
        gate = asyncio.Semaphore(load["concurrency"])

        async def one(request: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await self._answer(request, load)

        start = time.perf_counter()
        tasks = [asyncio.ensure_future(one(request)) for request in load["requests"]]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            # If one request fails, the others must not run on into the next contestant's measurement.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {"answers": answers, "wall_s": time.perf_counter() - start}

    async def _answer(self, request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=load["temperature"],
            max_tokens=load["max_tokens"],
            seed=request["seed"] if load["temperature"] > 0 else None,
            output_kind=RequestOutputKind.DELTA,
        )
        self._asked += 1
        start = time.perf_counter()
        tokens: list[int] = []
        arrivals = []
        prompt = {"prompt_token_ids": request["prompt"]}
        async for output in self._engine.generate(prompt, params, request_id=str(self._asked)):
            new = output.outputs[0].token_ids
            if new:
                tokens += new
                arrivals.append((time.perf_counter() - start, len(new)))
        return {"tokens": tokens, "arrivals": arrivals}

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
        # At interpreter exit its finaliser would call modules that are gone already.
        self._engine = None
        self._runner.close()
