"""What joins a token's embedding and the state before it into one row: EAGLE's matrix, and FSPAD's feature sampler."""

from __future__ import annotations

import torch
from torch import nn

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.layer import GatedMLP


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
