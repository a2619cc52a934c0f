"""Hugging Face transformers: ``generate``, prompt lookup, assisted generation."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

# The value that transformers' own documentation uses.
_LOOKUP_TOKENS = 10


class _Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when how many tokens came; of a batch, those of its first row."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seen: list[tuple[float, int]] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then what each pass gave."""
        if self._prompt:
            self._prompt = False
            return
        self.seen.append((time.perf_counter() - self.start, value.shape[-1] if value.dim() > 1 else 1))

    def end(self) -> None:
        """Nothing is left to do."""


class Peer:
    """One loaded model for all of transformers' ways to decode.

    Raises:
        OSError: the model cannot be read.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, spec["dtype"])
        self._device = torch.device(spec["device"])
        self._model = AutoModelForCausalLM.from_pretrained(spec["model_path"], dtype=dtype).to(self._device).eval()
        self._assistant = None
        if spec.get("assistant"):
            self._assistant = AutoModelForCausalLM.from_pretrained(spec["assistant"], dtype=dtype).to(self._device).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])
        self._pad = next((token for token in self._eos if token is not None), 0)

    def versions(self) -> dict[str, str]:
        """What runs."""
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer in batches of ``concurrency``: generate() knows no continuous batching."""
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
                max_new_tokens=load["max_tokens"],
                streamer=arrivals,
                pad_token_id=self._pad,
                **self._how(contestant, load["temperature"], requests[0]["seed"]),
            )
        answers = []
        for row in output[:, longest:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in self._eos), len(row))
            answers.append({"tokens": row[:end], "arrivals": _first(arrivals.seen, end)})
        return answers

    def _how(self, contestant: str, temperature: float, seed: int) -> dict[str, Any]:
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        if contestant == "hf_prompt_lookup":
            how["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        elif contestant == "hf_assisted":
            how["assistant_model"] = self._assistant
        return how

    def logits(self, tokens: list[int], ids: list[int]) -> dict[str, Any]:
        """The target's logits of ``ids`` after ``tokens``, and the two largest."""
        with torch.inference_mode():
            row = self._model(torch.tensor([tokens], device=self._device)).logits[0, -1].float()
        top = row.topk(2)
        return {"logits": row[ids].tolist(), "top": top.indices.tolist(), "top_logits": top.values.tolist()}

    def close(self) -> None:
        """Nothing to let go of."""


def _first(arrivals: list[tuple[float, int]], tokens: int) -> list[tuple[float, int]]:
    """The arrivals of the first ``tokens`` tokens."""
    kept, left = [], tokens
    for at, count in arrivals:
        if left > 0:
            kept.append((at, min(count, left)))
            left -= count
    return kept
