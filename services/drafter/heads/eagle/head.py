"""The head: one module for EAGLE-1 and 2, HASS, FSPAD and EAGLE-3, as its ``HeadConfig`` says.

Row i of a text is (embedding of token i + 1, state of position i), at position i; it predicts token i + 2. The state is the
target's wherever it is known, and else the one that the head itself fed back (``HeadOutput.state``).

Papers: EAGLE (2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840), HASS (2408.15766), FSPAD (2408.15562).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import Attend, GatedMLP, HeadLayer, RotaryPositions
from services.drafter.heads.shared_rows import OnTargetRows
from services.drafter.heads.state_head import HeadOutput


class Connector(nn.Module):
    """x = fc([embedding ; state]). With FSPAD's sampler, plus down(act(gate(embedding)) * up(norm(x))) (its section 3.1).

    The paper's figure 6 leaves out ``fc`` and the sum; the authors' code has both. The embedding gates: it says which token
    was sampled from what the state held open.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = nn.RMSNorm(config.embedding_size, eps=eps) if config.embed_norm else None
        self.state_norm = nn.RMSNorm(config.target_hidden_size, eps=eps) if config.state_norm else None
        self.fc = nn.Linear(config.embedding_size + config.target_hidden_size, size, bias=config.fc_bias)
        self.norm = nn.RMSNorm(size, eps=eps) if config.sampler else None
        self.mlp = GatedMLP(config, size, bias=False) if config.sampler else None

    @override
    def forward(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[..., h_e] and [..., h] to [..., h]."""
        if self.embed_norm is not None:
            embeddings = self.embed_norm(embeddings)
        if self.state_norm is not None:
            states = self.state_norm(states)
        joined: torch.Tensor = self.fc(torch.cat((embeddings, states), dim=-1))
        if self.mlp is None or self.norm is None:
            return joined
        sampled: torch.Tensor = joined + self.mlp(embeddings, self.norm(joined))
        return sampled


class FeatureHead(OnTargetRows):
    """Implements ``StateHead``. Its parameters are what was trained; the target's rows are shared, and no parameters.

    Args:
        draft_ids: [V_d] int64, the target tokens that it drafts; None: all.

    Attributes:
        missing_state: [h_t * layers], takes the place of a state of the target that is not known; zeros unless trained.
    """

    def __init__(self, config: HeadConfig, rows: TargetRows, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.missing_state = nn.Parameter(torch.zeros(config.state_size, dtype=torch.float32))
        self.connector = Connector(config) if config.family != "eagle3" else None
        self.states_norm = nn.RMSNorm(config.state_size, eps=eps) if config.norm_before_fc else None
        own = config.target_hidden_size
        self.fc_norm = nn.ModuleList(nn.RMSNorm(own, eps=eps) for _ in config.state_layers) if config.fc_norm else None
        fused = config.family == "eagle3" and config.fc
        self.fc = nn.Linear(config.state_size, size, bias=config.fc_bias) if fused else None
        self.layers = nn.ModuleList(HeadLayer(config, number) for number in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps=eps) if config.output_norm else None
        self._rotary = RotaryPositions(config)
        self._take_rows(config, rows, draft_ids)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it reads."""
        return self.config.state_layers

    @property
    def levels(self) -> int | None:
        """See ``StateHead``."""
        return None

    def alternatives(self, *, fed_back: bool) -> Iterator[tuple[str, FeatureHead]]:
        """See ``StateHead``."""
        # Masks are fed back nothing.
        if self.config.family != "eagle3" or (fed_back and self.config.mask_token_id is not None):
            return
        name = "norm_output" if fed_back else "norm_before_residual"
        flags: dict[str, Any] = {name: not getattr(self.config, name)}
        yield f"{name} must be {str(flags[name]).lower()}", self.under(replace(self.config, **flags))

    def under(self, config: HeadConfig) -> FeatureHead:
        """The same weights under other flags."""
        other = FeatureHead(config, self._rows, self.vocabulary.ids)
        other._share(self)
        return other

    def cache_shape(self, window: int) -> CacheShape:
        """The shape of its sessions' caches, if rows see ``window`` committed rows at most."""
        config = self.config
        return CacheShape(
            layers=config.num_layers,
            heads=config.num_key_value_heads,
            width=config.head_dim,
            window=min(window, config.window or window, config.max_positions),
            dtype=self.missing_state.dtype,
            device=self.missing_state.device,
        )

    def rows_behind(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHead``. Where it has a mask token, they are masks, whatever the tokens."""
        mask = self.config.mask_token_id
        if mask is None:
            return self.embed(tokens)[None], state
        masks = self.fuse(self.missing_state).expand(1, len(tokens), -1)
        return self.embed(torch.full_like(tokens, mask))[None], masks

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [..., h_t * layers] to what ``forward`` reads [..., h]; EAGLE-3 alone changes them."""
        if self.states_norm is not None:
            states = self.states_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states if self.fc is None else self.fc(states)

    @override
    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend) -> HeadOutput:
        """One pass over rows.

        Args:
            embeddings: [B, R, h_e], of the tokens after the rows' positions.
            states: [B, R, h], fused ones of the target or ``HeadOutput.state``.
            positions: [B, R] int64.
            attend: which rows each row sees; see ``Attend``. It keeps keys and values, if anyone does.
        """
        rows = states if self.connector is None else self.connector(embeddings, states)
        turns = self._rotary.factors(positions, rows.dtype)
        for layer in self.layers:
            rows = layer(rows, embeddings, turns, attend)
        hidden, state = rows.chunk(2, dim=-1) if self.config.two_outputs else (rows, rows)
        if self.norm is not None:
            hidden = self.norm(hidden)
            if self.config.norm_output:
                state = hidden
        return HeadOutput(hidden=hidden, state=state)

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h] to [..., V_d]: logits of ``vocabulary.ids``, shaped as the target's where the rows are the target's."""
        if self.lm_head is None:
            return self._output.logits(hidden, vocabulary)
        return vocabulary.scores(hidden) * self.config.logit_scale


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """An ``Attend`` without memory: every row sees itself and the rows before it."""
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
