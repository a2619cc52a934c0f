"""vLLM's asynchronous engine: plain, n-gram speculation, suffix decoding."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

_SPECULATION: dict[str, dict[str, Any]] = {
    # vLLM's own documented values.
    "vllm_ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "vllm_suffix": {"method": "suffix", "num_speculative_tokens": 16},
}

# Its processes do not end when they are told to, and are killed then, however long they are given.
_SHUTDOWN_TIMEOUT_S = 1.0


class Peer:
    """One engine: vLLM fixes how it speculates at start, so each of its ways is a process of its own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        on_cpu = spec["device"] == "cpu"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            # By itself it would leave a core to its scheduler, and lose more by that on a small machine than it gains.
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
            # Repeats ask the same prompts again: what is measured is the engine, not its memory of the last repeat.
            enable_prefix_caching=False,
            disable_log_stats=True,
            # Nothing is compiled for the CPU, but preparing for it takes two minutes.
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
        """What runs."""
        import torch

        return {"vllm": self._version, "torch": torch.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer ``concurrency`` requests at a time, batched continuously."""
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
            # Where one fails, the others must not go on into the next contestant's time.
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
        """Stop the engine's own processes."""
        self._engine.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
        # Its finaliser calls what the interpreter has taken down by then, if it is left to the end.
        self._engine = None
        self._runner.close()
