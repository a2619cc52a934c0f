"""Hugging Face transformers: ``generate``, prompt lookup, assisted generation."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

# The value used in transformers' documentation.
_LOOKUP_TOKENS = 10


class _Arrivals(BaseStreamer):  # type: ignore[misc]
    """Records when tokens arrive; for a batch, those of its first row."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seen: list[tuple[float, int]] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The first call brings the prompt, each later one the tokens of a pass."""
        if self._prompt:
            self._prompt = False
            return
        self.seen.append((time.perf_counter() - self.start, value.shape[-1] if value.dim() > 1 else 1))

    def end(self) -> None:
        """Required by ``BaseStreamer``."""


class Peer:
    """One loaded model for all of transformers' decoding methods; see ``worker.py`` for the interface.

    Raises:
        OSError: the model cannot be read.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, spec["dtype"])
        self._device = torch.device(spec["device"])
        self._model = AutoModelForCausalLM.from_pretrained(spec["model_path"], dtype=dtype).to(self._device).eval()
        self._spec = spec
        self._dtype = dtype
        self._assistant: Any = None
        eos = self._model.generation_config.eos_token_id
        self._eos: set[int] = set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
        self._pad = min(self._eos, default=0)
        # ``generate`` takes unset parameters from here, so the model's own defaults must go.
        self._model.generation_config = GenerationConfig()

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer in static batches of ``concurrency``: ``generate`` has no continuous batching."""
        start = time.perf_counter()
        answers: list[dict[str, Any]] = []
        size = load["concurrency"]
        for first in range(0, len(load["requests"]), size):
            answers += self._batch(contestant, load["requests"][first : first + size], load)
        return {"answers": answers, "wall_s": time.perf_counter() - start}

    def _batch(self, contestant: str, requests: list[dict[str, Any]], load: dict[str, Any]) -> list[dict[str, Any]]:
        longest = max(len(request["prompt"]) for request in requests)
        padding = [longest - len(request["prompt"]) for request in requests]
        ids = [[self._pad] * pad + request["prompt"] for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        arrivals = _Arrivals()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                streamer=arrivals,
                generation_config=self._config(load["temperature"], load["max_tokens"], requests[0]["seed"]),
                **self._how(contestant),
            )
        answers = []
        for row in output[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in self._eos), len(row))
            answers.append({"tokens": row[:end], "arrivals": _first(arrivals.seen, end)})
        return answers

    def _config(self, temperature: float, max_tokens: int, seed: int) -> GenerationConfig:
        """The requested parameters only: the model's own file may contain penalties."""
        common = {"max_new_tokens": max_tokens, "eos_token_id": sorted(self._eos), "pad_token_id": self._pad}
        if temperature == 0:
            return GenerationConfig(do_sample=False, **common)
        torch.manual_seed(seed)
        return GenerationConfig(do_sample=True, temperature=temperature, top_p=1.0, top_k=0, **common)

    def _how(self, contestant: str) -> dict[str, Any]:
        if contestant == "hf_prompt_lookup":
            return {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        if contestant == "hf_assisted":
            if self._assistant is None:
                model = AutoModelForCausalLM.from_pretrained(self._spec["assistant"], dtype=self._dtype)
                self._assistant = model.to(self._device).eval()
            return {"assistant_model": self._assistant}
        return {}

    def logits(self, tokens: list[int], ids: list[int]) -> dict[str, Any]:
        """The target's logits of ``ids`` after ``tokens``."""
        with torch.inference_mode():
            row = self._model(torch.tensor([tokens], device=self._device)).logits[0, -1].float()
        return {"logits": row[ids].tolist()}

    def close(self) -> None:
        """Nothing to release."""


def _first(arrivals: list[tuple[float, int]], tokens: int) -> list[tuple[float, int]]:
    """The arrivals of the first ``tokens`` tokens."""
    kept, left = [], tokens
    for at, count in arrivals:
        if left > 0:
            kept.append((at, min(count, left)))
            left -= count
    return kept
