"""Heads on a block's rows that know the tokens before: those of DSpark (2607.05147), DFlash2 and Domino (2605.29707)."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.blocks.config import BlockConfig


class MarkovHead(nn.Module):
    """Adds W2 e to a row's logits, where e = W1[previous token]: a transition matrix of low rank.

    Gated, the row weighs e first: sigmoid(G [row ; e]) * e. Recurrent, e is the output of a cell over the block's tokens.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        layer, rank, kind = config.layer, config.markov_rank, config.markov_kind
        self.markov_w1 = nn.Embedding(layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, layer.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(layer.hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(layer.hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None

    @override
    def forward(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows [..., h], the tokens before what they guess, int64 [...], and the states before these, [..., r]: what is
        added to the logits, [..., V_d], and the states after. Only the recurrent one has states."""
        before, state = self.weighed(hidden, previous, state)
        return self.markov_w2(before), state

    def weighed(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the same: what W2 is multiplied by, [..., r], and the states after."""
        before = self.markov_w1(previous)
        if self.gate_proj is not None:
            before = torch.sigmoid(self.gate_proj(torch.cat((hidden, before), dim=-1))) * before
        if self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat((state, before, hidden), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state, before = gate * state + (1 - gate) * torch.tanh(new), torch.tanh(out)
        return before, state


class ConfidenceHead(nn.Module):
    """The share of a row's distribution that the target is expected to share, where all tokens before are right."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        read = config.layer.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.proj = nn.Linear(read, 1)

    @override
    def forward(self, read: torch.Tensor) -> torch.Tensor:
        """Rows [..., h], with W1's row behind where it reads it, to probabilities [...]."""
        sure: torch.Tensor = torch.sigmoid(self.proj(read)[..., 0])
        return sure


class CandidateSelector(nn.Module):
    """DFlash2: to the logits of a row's likeliest tokens, adds S[token] . (P[previous token] * H row). No other can come."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        layer, rank = config.layer, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(layer.vocab_size, rank, dtype=torch.float32))
        self.successor_codebook = nn.Parameter(torch.empty(layer.vocab_size, rank, dtype=torch.float32))
        self.hidden_projection = nn.Linear(layer.hidden_size, rank, bias=False)
        self._count = config.selector_top_k

    @override
    def forward(self, logits: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of rows [..., h], corrected by the tokens before what they guess, int64 [...]; -inf elsewhere."""
        likeliest, tokens = logits.topk(min(self._count, logits.shape[-1]), dim=-1)
        wanted = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        scores = likeliest + (self.successor_codebook[tokens] @ wanted[..., None])[..., 0].to(likeliest)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, scores)


def gru_output(config: BlockConfig) -> nn.Sequential:
    """Domino: of a row and the state of the tokens before, [n, h + gru size], what is added to the logits, [n, V_d]."""
    layer, inner = config.layer, config.gru_inner_size
    return nn.Sequential(
        nn.Linear(layer.hidden_size + config.gru_size, inner, bias=False),
        nn.SiLU(),
        nn.Linear(inner, layer.draft_vocab_size, bias=False),
    )
