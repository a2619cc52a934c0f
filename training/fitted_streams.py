"""Where streams begin to learn: embeddings as large as states are, and adapters by least squares, layer by layer.

Stream j of position t should make what the main row of position t + 1 + j makes, which knows the tokens between. From below
to above, each layer's adapter on o and then the one on down is the regression of what is missing there on what the adapter
reads, of the adapters' rank. Nothing is learnt about queries and values. Adapters that begin as zero take hundreds of steps
to write as much as the layers do: states behind the middle layers are ten times as large as those behind the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from services.drafter.heads.streams.streams import AdaptedLinear, Streams
from services.drafter.heads.streams.whole_texts import BehindMain, MainRows, begun
from training.open_run import OpenedModel
from training.recipe import StreamsRecipe
from training.shards import Shards, TrainingSequence

# Of the embeddings, over that of the states.
_SPREAD = 0.3
# Of the anchors of an answer, those that are fitted on.
_SHARE = 0.5
# On the diagonal, over its mean.
_RIDGE = 0.01


@dataclass(kw_only=True, slots=True)
class _Text:
    """One text on its way through the layers.

    Attributes:
        main: [1, T, h], its main rows; ``rows``: [1, R, h], its streams.
        positions: [1, R]; ``seen``: what each stream sees, see ``begun``.
        wanted: [R], the main row that each stream should be.
    """

    main: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    wanted: torch.Tensor


@torch.no_grad()
def fit_start(opened: OpenedModel, shards: Shards) -> bool:
    """Give untrained streams embeddings and adapters, if the recipe says so. Returns whether it does."""
    recipe, module = opened.recipe, opened.learner.module
    if not (isinstance(recipe, StreamsRecipe) and isinstance(module, Streams) and recipe.fitted):
        return False
    random = np.random.default_rng(recipe.seed)
    chosen = list(_chosen(opened, shards, recipe.fitted, random))
    device = module.stream_embeddings.device
    spread = torch.cat([states[0] for states, _ in chosen]).std(dim=0)
    noise = torch.randn(module.stream_embeddings.shape, generator=torch.Generator().manual_seed(recipe.seed))
    module.stream_embeddings.copy_(noise.to(device) * spread * _SPREAD)
    texts = []
    for states, anchors in chosen:
        rows, positions, seen = begun(module, states, anchors)
        texts.append(_Text(main=states, rows=rows, positions=positions, seen=seen, wanted=positions[0]))
    for number in range(module.config.num_layers):
        _fit_layer(module, number, texts)
    return True


def _chosen(
    opened: OpenedModel, shards: Shards, most: int, random: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """States [1, T, h] of the layer that streams begin behind, and anchors [1, A], of ``most`` anchors or all there are."""
    device, levels = opened.output.device, opened.recipe.streams  # type: ignore[union-attr]
    left = most
    for index in random.permutation(len(shards)).tolist():
        sequence: TrainingSequence = opened.as_served(shards.sequence(index))
        # The state behind the last token is not known.
        there = np.arange(max(0, sequence.prompt_length - 1), len(sequence.tokens) - 1 - levels)
        if left <= 0 or not len(there):
            continue
        anchors = np.sort(random.choice(there, min(left, max(1, round(_SHARE * len(there)))), replace=False))
        left -= len(anchors)
        states = torch.from_numpy(sequence.states.astype(np.float32))
        yield states[None].to(device), torch.from_numpy(anchors)[None].to(device)


def _fit_layer(module: Streams, number: int, texts: Sequence[_Text]) -> None:
    """Fit a layer's two adapters, and move all texts behind it."""
    layer = module.own.layers[number]
    attention, mlp = layer.get_submodule("self_attn.o_proj"), layer.get_submodule("mlp.down_proj")
    assert isinstance(attention, AdaptedLinear) and isinstance(mlp, AdaptedLinear)
    kept, added, behind = [], [], []
    for text in texts:
        attend = MainRows()
        everywhere = torch.arange(text.main.shape[1], device=text.main.device)[None]
        with _noted(attention) as noted:
            behind.append(module.layer(number, text.main, everywhere, attend, streams=0))
        added.append(text.main + noted[0][1])
        kept.append(attend)
    weights = 1 / torch.cat([each[0] for each in behind]).std(dim=0).clamp(min=1e-3)
    for adapted, wanted in ((attention, added), (mlp, behind)):
        fit = LowRankFit()
        for text, attend, goal in zip(texts, kept, wanted, strict=True):
            with _noted(attention) as of_attention, _noted(mlp) as of_mlp:
                made = _through(module, number, text, attend)
            read, at = (of_attention[0][0], text.rows + of_attention[0][1]) if adapted is attention else (of_mlp[0][0], made)
            fit.add(read[0], (goal[0, text.wanted] - at[0]) * weights)
        fit.give(adapted, weights, module.config.alpha / module.config.rank)
    for text, attend, goal in zip(texts, kept, behind, strict=True):
        text.rows = _through(module, number, text, attend)
        text.main = goal


def _through(module: Streams, number: int, text: _Text, kept: MainRows) -> torch.Tensor:
    return module.layer(number, text.rows, text.positions, BehindMain(kept, text.seen), streams=text.rows.shape[1])


@contextmanager
def _noted(part: torch.nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What a part reads and writes meanwhile."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = part.register_forward_hook(lambda _, read, written: found.append((read[0], written)))
    try:
        yield found
    finally:
        handle.remove()


class LowRankFit:
    """Least squares of what is missing [n, h] on what is read [n, inputs], in sums."""

    def __init__(self) -> None:
        self._gram = torch.zeros(())
        self._cross = torch.zeros(())
        self._count = 0

    def add(self, read: torch.Tensor, missing: torch.Tensor) -> None:
        """Add some rows."""
        self._gram = self._gram.to(read.device) + (read.T @ read).double()
        self._cross = self._cross.to(read.device) + (read.T @ missing).double()
        self._count += len(read)

    def give(self, adapted: AdaptedLinear, weights: torch.Tensor, scale: float) -> None:
        """Set an adapter to the best of its rank. What its first half makes has a root mean square of 1.

        Args:
            weights: [h], what the missing was multiplied by; ``scale``: what the adapter's product is.
        """
        gram = self._gram + _RIDGE * self._gram.diagonal().mean() * torch.eye(len(self._gram), device=self._gram.device)
        every = torch.linalg.solve(gram, self._cross)
        rank = min(adapted.lora_A.out_features, every.shape[1])
        directions = torch.linalg.eigh(every.T @ self._gram @ every).eigenvectors[:, -rank:]
        down = (every @ directions).T
        sizes = (((down @ self._gram) * down).sum(dim=1) / max(1, self._count)).clamp(min=1e-12).sqrt()
        adapted.lora_A.weight[:rank] = (down / sizes[:, None]).float()
        adapted.lora_B.weight[:, :rank] = (directions * sizes / weights[:, None].double() / scale).float()
