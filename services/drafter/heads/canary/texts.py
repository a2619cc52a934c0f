"""Text that the target wrote itself, with its states, for the canary: recorded once, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from services.drafter.heads.files.head_config import FINAL, TargetShape
from services.model_files.folder import reading
from speculation.errors import ConfigurationError
from speculation.files import write_whole

# In a checkpoint's folder; deeper than its weights, so that no other engine takes it for some of them.
TEXTS = Path("canary") / "texts.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryText:
    """A text of the target, at temperature 0.

    Attributes:
        tokens: [n] int64, prompt and answer.
        answer: position of the first token that the target chose.
        states: by layer (see ``Features.layers``), [n, h_t]; with those beside the head's own, a wrong layer can be named.
    """

    tokens: torch.Tensor
    answer: int
    states: Mapping[int, torch.Tensor]


def beside(layer: int, by: int, target: TargetShape) -> int | None:
    """The layer ``by`` further up; behind the last one comes its state after the final norm."""
    total = target.num_layers
    at = (total if layer == FINAL else layer % total) + by
    return FINAL if at == total else at if 0 <= at < total else None


def layers_to_record(layers: Iterable[int], target: TargetShape) -> tuple[int, ...]:
    """The layers that a head reads and those beside them, for texts that can tell a wrong layer."""
    wanted = {beside(layer, by, target) for layer in layers for by in (-1, 0, 1)}
    return tuple(sorted(layer for layer in wanted if layer is not None))


def save_texts(texts: Sequence[CanaryText], file: Path) -> None:
    """Write texts to one safetensors file, their states as float16."""
    tensors: dict[str, torch.Tensor] = {}
    most = torch.finfo(torch.float16).max
    for index, text in enumerate(texts):
        tensors[f"{index}.tokens"] = text.tokens.to("cpu", torch.int64)
        for layer, states in text.states.items():
            tensors[f"{index}.states.{layer}"] = states.cpu().clamp(-most, most).half().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save(tensors, metadata={"answers": json.dumps([text.answer for text in texts])}))


def read_texts(file: Path) -> list[CanaryText]:
    """The texts in a file.

    Raises:
        ConfigurationError: it cannot be read, or holds something else.
    """
    with reading(f"read the canary's texts in {file}", about=file), safe_open(file, framework="pt") as opened:
        answers: Any = json.loads(opened.metadata()["answers"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return [
        CanaryText(
            tokens=tensors[f"{index}.tokens"],
            answer=int(answer),
            states={
                int(name.rpartition(".")[2]): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{index}.states.")
            },
        )
        for index, answer in enumerate(answers)
    ]


@torch.no_grad()
def record_texts(model: Any, prompts: Iterable[Sequence[int]], layers: Sequence[int], length: int = 96) -> list[CanaryText]:
    """Let a target answer prompts at temperature 0.

    Args:
        model: a transformers causal LM.
        prompts: token ids of each.
        layers: whose states are wanted, as in ``Features.layers``, counted from the first one; see ``layers_to_record``.
        length: most tokens of an answer.

    Raises:
        ConfigurationError: the model's layers cannot be observed one by one.
    """
    texts = []
    for prompt in prompts:
        given = torch.tensor([list(prompt)], device=model.device)
        tokens = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=length)
        with _observed(model, layers) as states:
            model(tokens)
        texts.append(CanaryText(tokens=tokens[0].cpu(), answer=len(prompt), states=dict(states)))
    return texts


@contextmanager
def _observed(model: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Keep the states of a pass over one text."""
    total = model.config.get_text_config().num_hidden_layers
    lists = (each for each in model.get_decoder().modules() if isinstance(each, torch.nn.ModuleList) and len(each) == total)
    found = next(lists, None)
    if found is None:
        raise ConfigurationError(
            f"the layers of {type(model).__name__} cannot be observed one by one", about=type(model).__name__
        )
    states: dict[int, torch.Tensor] = {}

    def keep(layer: int, made: Any) -> None:
        rows = made if isinstance(made, torch.Tensor) else made[0]
        states[layer] = rows[0].detach().clone()

    hooks = [
        found[layer].register_forward_hook(lambda module, given, made, layer=layer: keep(layer, made))
        for layer in layers
        if layer != FINAL
    ]
    hooks.append(model.get_output_embeddings().register_forward_pre_hook(lambda module, given: keep(FINAL, given[0])))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def shown_layers(layers: Sequence[int]) -> str:
    """Layers in words."""
    return ", ".join("the output layer's input" if layer == FINAL else f"layer {layer}" for layer in layers)


def held_states(text: CanaryText, layer: int, target: TargetShape) -> torch.Tensor | None:
    """[n, h_t], a text's states of a layer; None if it does not hold them."""
    return text.states.get(layer if layer == FINAL else layer % target.num_layers)


def states_of(text: CanaryText, layers: Sequence[int], target: TargetShape) -> torch.Tensor:
    """[n, h_t * layers], a text's states of ``layers``, which it holds."""
    found = [states for layer in layers if (states := held_states(text, layer, target)) is not None]
    assert len(found) == len(layers)
    return torch.cat(found, dim=-1)
