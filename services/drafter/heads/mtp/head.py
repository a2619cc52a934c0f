"""MTP layers as a head: each is fc([norm(embedding) ; norm(state)]), one decoder layer, and a norm; the output layer is the
target's (DeepSeek-V3, 2412.19437, section 2.2).

One layer alone drafts several tokens by being fed its own output, as engines do. Of several, layer k guesses the token k + 1
ahead of a position from its state and the token k ahead. So the row of a token runs through all layers: in layer k it stands
for the position k before it. What it reads there, the row before it hands on: what that row made one layer below, or
where layers are not chained, the target's state that it read there. A drafted token of depth d is new to the first d layers,
whose states the target has not made yet, and layer d + 1 guesses what comes behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_vocabulary import DraftVocabulary, SharedOutput
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import Attend, TextAttend
from services.drafter.heads.mtp.block import DecoderBlock
from services.drafter.heads.mtp.config import MtpConfig
from services.drafter.heads.products import HeadProducts
from services.drafter.heads.state_head import HeadOutput


class MtpLayer(nn.Module):
    """One layer.

    Args:
        norm: makes a norm over h, of the target's kind.
    """

    def __init__(self, config: MtpConfig, block: DecoderBlock, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_norm, self.state_norm = norm(), norm()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = norm() if config.output_norm else None

    @override
    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend, *, config: MtpConfig
    ) -> HeadOutput:
        """As ``StateHead``; of ``config``, flags that change no tensor."""
        pair = (self.embed_norm(embeddings), self.state_norm(states))
        joined = self.fc(torch.cat(pair[::-1] if config.mtp_hidden_states_first else pair, dim=-1))
        made = self.block(joined, positions, attend)
        hidden = made if self.norm is None else self.norm(made)
        return HeadOutput(hidden=hidden, state=hidden if config.norm_output else made)


class MtpHead(nn.Module):
    """Implements ``StateHead``.

    Args:
        layers: in the order of what they guess.
    """

    missing_state: torch.Tensor

    def __init__(self, config: MtpConfig, rows: TargetRows, layers: Sequence[MtpLayer]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self._sizes = [layer.block.sizes for layer in layers]
        self.register_buffer("missing_state", torch.zeros(config.hidden_size, dtype=torch.float32), persistent=False)
        self._rows = rows
        self._output = SharedOutput(rows, torch.arange(config.vocab_size))

    def multiply_by(self, products: HeadProducts) -> None:
        """Multiply by the kernels, but for transformers' own layers, which may do anything with their weights."""
        self._output.multiply_by(products)
        own = [module for layer in self.layers if isinstance(layer, MtpLayer) for module in layer.block.modules()]
        products.replace_in(self, kept=own)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.config.state_layers

    @property
    def levels(self) -> int | None:
        """See ``StateHead``."""
        return None if self.config.num_layers == 1 else self.config.num_layers

    def alternatives(self, *, fed_back: bool) -> Iterator[tuple[str, MtpHead]]:
        """See ``StateHead``."""
        several = self.config.num_layers > 1
        handed_on = {"norm_output": self.config.output_norm, "chain_mtp_hidden_states": several}
        for name in [name for name, there in handed_on.items() if there] if fed_back else ["mtp_hidden_states_first"]:
            flags: dict[str, Any] = {name: not getattr(self.config, name)}
            other = copy.copy(self)
            other.config = replace(self.config, **flags)
            yield f"{name} must be {str(flags[name]).lower()}", other
        if several and not fed_back:
            for first in sorted({1, self.config.num_layers - 1}):
                yield f"its layers are counted wrong: layer {first + 1} must be the first", self._counted_from(first)

    def _counted_from(self, first: int) -> MtpHead:
        layers = [layer for layer in self.layers if isinstance(layer, MtpLayer)]
        other = MtpHead(self.config, self._rows, [*layers[first:], *layers[:first]])
        other.missing_state = self.missing_state
        return other

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._output.vocabulary

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        return self._output.beyond(tokens)

    def cache_shape(self, window: int) -> CacheShape:
        first, count = self._sizes[0], len(self._sizes)
        return CacheShape(
            layers=first.calls * count,
            heads=first.heads,
            width=first.width,
            window=min(window, self.config.max_positions, *(each.window or window for each in self._sizes)),
            dtype=self.missing_state.dtype,
            device=self.missing_state.device,
            # The first tokens are no rows of the later layers: there is no position so far before them.
            begins=tuple(number for number in range(count) for _ in range(first.calls)),
            handed=count - 1,
            handed_width=self.config.hidden_size,
        )

    def rows_behind(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHead``."""
        return self.embed(tokens)[None], state

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._rows.embedding.rows(tokens)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    @override
    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: TextAttend
    ) -> HeadOutput:
        """See ``StateHead``; of several layers, nothing is fed back but what ``attend`` hands on."""
        if len(self.layers) == 1:
            made: HeadOutput = self.layers[0](embeddings, states, positions, attend, config=self.config)
            return made
        depths = attend.depths.to(states.device)
        hidden, first = torch.zeros_like(states), int(depths.min())
        for number in range(first, len(self.layers)):
            read = attend.handed(number - 1) if number else states
            output = self._layer(number, embeddings, read, positions, attend)
            if number + 1 < len(self.layers):
                attend.hand_on(output.state if self.config.chain_mtp_hidden_states else read, number)
            hidden = torch.where((depths == number)[:, None], output.hidden, hidden)
        return HeadOutput(hidden=hidden, state=hidden)

    def _layer(
        self, number: int, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: TextAttend
    ) -> HeadOutput:
        calls = self._sizes[0].calls

        def of_layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
            return attend(query, key, value, number * calls + call)

        output: HeadOutput = self.layers[number](embeddings, states, positions, of_layer, config=self.config)
        return output

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        return self._output.logits(hidden, vocabulary)
