"""Gemma 4's assistants as a head: pre_projection([embedding ; state]), layers that look at the target's keys and values, and
an output layer of its own over all tokens or those of the likeliest clusters (transformers 5.24, ``Gemma4Assistant``).

Row i is, as of every head, (embedding of token i + 1, state of position i). Its query stands at position i + 1, that of the
token, whose own keys the target has not made yet: it sees those up to position i. Rows drafted behind it see no more and
stand at that very position, so that only their token and the state fed back tell them apart; what is fed back is a state of
the target's width. Rows of drafts keep nothing, and of a text's rows only the last one need run through the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.drafter.heads.assistant.config import AssistantConfig, Kind
from services.drafter.heads.assistant.layer import AssistantLayer
from services.drafter.heads.assistant.looked_at import TargetKeys, frequencies
from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import TextAttend, Turns
from services.drafter.heads.products import HeadProducts
from services.drafter.heads.state_head import HeadOutput

# Rows whose clusters' tokens are scored at a time: each has rows of the output layer of its own.
_AT_ONCE = 16


class ClusteredOutput(nn.Module):
    """Scores the tokens of the likeliest clusters alone; the others come behind all of them."""

    token_ordering: torch.Tensor

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self._active = config.active
        self.centroids = nn.Linear(config.hidden_size, config.centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.int64))

    @override
    def forward(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] with the output layer's rows [V, h] to [n, V]."""
        return torch.cat([self._few(part, rows) for part in torch.split(hidden, _AT_ONCE)])

    def _few(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        active = self.centroids(hidden).topk(self._active, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[active].flatten(1)
        scores = (rows[tokens] @ hidden[..., None]).squeeze(-1)
        others = (scores.amin(-1, keepdim=True) - 1.0).expand(-1, len(rows))
        return others.scatter(-1, tokens, scores)


class AssistantHead(nn.Module):
    """Implements ``StateHead``.

    Args:
        keys: by kind, what makes the target's keys and values; no parameters of it.
    """

    missing_state: torch.Tensor

    def __init__(self, config: AssistantConfig, rows: TargetRows, keys: Mapping[Kind, TargetKeys]) -> None:
        super().__init__()
        size, target = config.hidden_size, config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False) if config.own_output else None
        self.pre_projection = nn.Linear(2 * target, size, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(config, kind) for kind in config.kinds)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.post_projection = nn.Linear(size, target, bias=False)
        self.masked_embedding = ClusteredOutput(config) if config.centroids else None
        self.register_buffer(
            "missing_state", torch.zeros(target * len(config.state_layers), dtype=torch.float32), persistent=False
        )
        # Over all rows, by the kernels.
        self._multiplied: DraftVocabulary | None = None
        self._rows = rows
        self._keys = keys
        self._key_turns = {kind: Turns(frequencies(each.rope, each.width)) for kind, each in config.looked_at.items()}
        self._take_queries(config)

    def _take_queries(self, config: AssistantConfig) -> None:
        """Turn queries as a configuration says."""
        self.config = config
        self._turns = {kind: Turns(frequencies(each.query_rope, each.width)) for kind, each in config.looked_at.items()}

    def multiply_by(self, products: HeadProducts) -> None:
        """Multiply by the kernels: its linear layers, which no longer have a weight then, and the output rows, if all of
        them are scored."""
        if self.masked_embedding is None:
            self._multiplied = self.vocabulary.by(products)
        products.replace_in(self, kept=(self.lm_head,))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """See ``StateHead``."""
        return self.config.state_layers

    @property
    def levels(self) -> int | None:
        """See ``StateHead``."""
        return None

    def alternatives(self, *, fed_back: bool) -> Iterator[tuple[str, AssistantHead]]:
        """See ``StateHead``."""
        looked_at = {kind: replace(each, query_rope=each.rope) for kind, each in self.config.looked_at.items()}
        if not fed_back and looked_at != self.config.looked_at:
            other = copy.copy(self)
            other._take_queries(replace(self.config, looked_at=looked_at))
            yield "its rope_parameters must be the target's", other

    @property
    def vocabulary(self) -> DraftVocabulary:
        if self._multiplied is not None:
            return self._multiplied
        rows = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return DraftVocabulary(ids=torch.arange(self.config.vocab_size), rows=rows)

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """Nothing: it scores all tokens."""
        return None

    def cache_shape(self, window: int) -> CacheShape:
        """As of ``StateHead``. Its layers are the kinds; heads lie side by side, since they are not as many of each kind."""
        return CacheShape(
            layers=len(self._keys),
            heads=1,
            width=self.config.row_width + 1,
            window=min(window, self.config.max_positions),
            dtype=self.missing_state.dtype,
            device=self.missing_state.device,
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings as its first layer reads them."""
        rows = self._rows.embedding.rows(tokens)
        # In the numbers' own type, in which the target has the factor, too.
        return rows * torch.tensor(self.config.target_hidden_size**0.5, dtype=rows.dtype, device=rows.device)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """As they are: rows of a text read the states of all layers, drafted ones the last one alone."""
        return states

    def rows_behind(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHead``."""
        return self.embed(tokens)[None], state

    @override
    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: TextAttend
    ) -> HeadOutput:
        """See ``StateHead``; B is 1. Rows that do not matter give zeros."""
        count, last = states.shape[1], states[..., -self.config.target_hidden_size :]
        if states.shape[-1] > last.shape[-1]:
            self._keep(states, positions, attend)
        # Drafted rows stand where the last row of the text does: one behind its state.
        positions = positions - attend.depths.to(positions.device) + 1
        looking = attend.looking
        if looking is not None:
            looking = looking.to(states.device)
            embeddings, last, positions = embeddings[:, looking], last[:, looking], positions[:, looking]
        hidden = self.norm(self._through_layers(torch.cat((embeddings, last), dim=-1), positions, attend))
        fed_back = self.post_projection(hidden)
        if looking is not None:
            hidden, fed_back = (
                each.new_zeros(1, count, each.shape[-1]).index_copy(1, looking, each) for each in (hidden, fed_back)
            )
        return HeadOutput(hidden=hidden, state=fed_back)

    def _through_layers(self, read: torch.Tensor, positions: torch.Tensor, attend: TextAttend) -> torch.Tensor:
        rows = self.pre_projection(read)
        turns = {kind: own.factors(positions, rows.dtype) for kind, own in self._turns.items()}
        seen = {
            kind: attend.seen(number, self.config.window if kind == "sliding_attention" else None)
            for number, kind in enumerate(self._keys)
        }
        for layer in self.layers:
            assert isinstance(layer, AssistantLayer)
            rows = layer(rows, turns[layer.kind], seen[layer.kind])
        made: torch.Tensor = rows
        return made

    def _keep(self, states: torch.Tensor, positions: torch.Tensor, attend: TextAttend) -> None:
        """Make the target's keys and values of a text's rows; a row whose states have not come is hidden until they do."""
        parts = states.view(*states.shape[:2], -1, self.config.target_hidden_size)
        most = torch.finfo(states.dtype).max / 4
        # No layer of a target gives zeros alone.
        hidden = torch.where(states.any(-1, keepdim=True), 0.0, -most).to(states.dtype)
        for number, (kind, keys) in enumerate(self._keys.items()):
            key, value = keys.of(parts[..., number, :], self._key_turns[kind], positions)
            spare = self.config.row_width - key.shape[-1]
            key = torch.cat((functional.pad(key, (0, spare)), hidden), dim=-1)
            attend.keep(key, functional.pad(value, (0, spare + 1)), number)

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """See ``StateDrafter``. They are not capped as the target's: transformers takes them as they are."""
        if self.masked_embedding is None:
            return vocabulary.scores(hidden)
        found: torch.Tensor = self.masked_embedding(hidden.flatten(0, -2), vocabulary.rows)
        return found.view(*hidden.shape[:-1], -1)
