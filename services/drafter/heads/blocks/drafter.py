"""A block drafter: the last committed token and masks behind it, through layers whose keys and values are the target's, too.

The target's states of several layers are fused once; every layer makes keys and values of them, which stand before the
block's own. So a text costs no more than these projections, and a state that comes late takes its place exactly.
(Chen et al., DFlash, 2602.06036, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.blocks.convolved_layer import ConvolvedLayer
from services.drafter.heads.blocks.sequential import CandidateSelector, ConfidenceHead, MarkovHead, gru_output
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import Attend, HeadLayer, RotaryPositions
from services.drafter.heads.shared_rows import OnTargetRows

# Takes a layer's keys and values, [B, key-value heads, R, head_dim] each, and its number.
Keep = Callable[[torch.Tensor, torch.Tensor, int], None]


class BlockDrafter(OnTargetRows):
    """Its parameters are what was trained; the target's rows are shared, and no parameters.

    Args:
        draft_ids: [V_d] int64, the target tokens that it drafts; None: all.
    """

    def __init__(self, config: BlockConfig, rows: TargetRows, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(layer.state_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(
            ConvolvedLayer(config, number) if config.conv_kernel_size else HeadLayer(layer, number)
            for number in range(layer.num_layers)
        )
        self.norm = nn.RMSNorm(size, eps=eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        gru = config.gru_size
        self.prefix_gru = nn.GRU(size, gru, batch_first=True, bias=False) if gru else None
        self.embed_proj = gru_output(config) if gru else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self._rotary = RotaryPositions(layer)
        self._take_rows(layer, rows, draft_ids)

    def under(self, config: BlockConfig) -> BlockDrafter:
        """The same weights under other flags."""
        other = BlockDrafter(config, self.rows, self.vocabulary.ids)
        other._share(self)
        return other

    def keep_states(self, states: torch.Tensor, positions: torch.Tensor, keep: Keep) -> None:
        """Make keys and values of the target's states.

        Args:
            states: [B, R, h_t * layers].
            positions: [B, R] int64.
        """
        fused = self.hidden_norm(self.fc(states))
        turns = self._rotary.factors(positions, fused.dtype)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, HeadLayer)
            keep(*layer.self_attn.keys_and_values(fused, turns), number)

    @override
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """One pass over blocks.

        Args:
            tokens: [B, R] int64, whole blocks, see ``block_of``.
            positions: [B, R] int64.
            attend: which rows each row sees, the kept ones among them.

        Returns:
            [B, R, h], what the output layer reads.
        """
        rows = self.embed(tokens) * self.config.embedding_scale
        turns = self._rotary.factors(positions, rows.dtype)
        for layer in self.layers:
            rows = layer(rows, rows, turns, attend)
        hidden: torch.Tensor = self.norm(rows)
        return hidden

    def block_of(self, anchors: torch.Tensor) -> torch.Tensor:
        """[..., block size], the tokens of the blocks behind last committed tokens [...]."""
        masks = anchors.new_full((*anchors.shape, self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors[..., None], masks), dim=-1)

    def guesses(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of a block's rows [..., block size, h], those that guess, [..., levels, h]."""
        return hidden if self.config.from_anchor else hidden[..., 1:, :]

    @override
    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """As ``SharedOutput.beyond``; None, too, if a head that knows the token before has no rows for others."""
        heads = (self.markov_head, self.candidate_selector, self.embed_proj)
        return super().beyond(tokens) if all(head is None for head in heads) else None

    @property
    def sequential(self) -> bool:
        """Whether what a row says depends on the tokens before what it guesses."""
        heads = (self.markov_head, self.candidate_selector, self.embed_proj, self.confidence_head)
        return any(head is not None for head in heads)

    @property
    def state_size(self) -> int:
        """Width of what it knows of the tokens before the last one; 0: nothing."""
        recurrent = self.config.markov_rank if self.config.markov_kind == "rnn" else 0
        return recurrent or self.config.gru_size

    def corrected(
        self, logits: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor, levels: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of rows, once the tokens before what they guess are known.

        Args:
            logits: [n, V_d].
            hidden: [n, h].
            previous: int64 [n], the token before.
            levels: int64 [n], how many of the block come before that one; 0: it is the last committed one.
            state: [n, state size], what was returned for that token's row; zeros for the last committed one.

        Returns:
            The logits, and the states of these rows.
        """
        if self.markov_head is not None:
            added, state = self.markov_head(hidden, previous, state)
            logits = logits + added.to(logits)
        if self.candidate_selector is not None:
            logits = self.candidate_selector(logits, hidden, previous)
        if self.prefix_gru is not None and self.embed_proj is not None:
            state = self.prefix_gru(self.embed(previous)[:, None], state[None].contiguous())[1][0]
            added = self.embed_proj(torch.cat((hidden, state), dim=-1)).to(logits)
            logits = torch.where((levels >= self.config.gru_from)[:, None], logits + added, logits)
        return logits, state

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Of the same: how sure each row is, [...]; None: nobody says."""
        if self.confidence_head is None:
            return None
        sure: torch.Tensor = self.confidence_head(self.confidence_read(hidden, previous))
        return sure

    def confidence_read(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Of the same: what the confidence head reads."""
        if self.config.confidence_with_markov and self.markov_head is not None:
            return torch.cat((hidden, self.markov_head.markov_w1(previous)), dim=-1)
        return hidden

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h] to [..., V_d]: logits of ``vocabulary.ids``, shaped as the drafter's own fields say."""
        logits = vocabulary.scores(hidden) * self.config.logit_scale
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
