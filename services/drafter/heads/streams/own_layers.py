"""The target's own last layers, final norm included, for a drafter that goes on from a state inside the target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.layer import Attend, HeadLayer, RotaryPositions
from services.drafter.heads.streams.last_layers import LastLayers
from services.model_files.folder import reading
from services.model_files.weights.files import WeightFiles


class OwnLayers(nn.Module):
    """The last layers; row i stands at its position and reads the state that the target's layer before them made there."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HeadLayer(config, number) for number in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._rotary = RotaryPositions(config)

    @override
    def forward(self, rows: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[B, R, h] at positions [B, R] to [B, R, h], what the output layer reads."""
        turns = self._rotary.factors(positions, rows.dtype)
        for layer in self.layers:
            rows = layer(rows, rows, turns, attend)
        normed: torch.Tensor = self.norm(rows)
        return normed

    def layer(self, number: int, rows: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What one of the layers alone makes of rows, as in ``forward``."""
        made: torch.Tensor = self.layers[number](rows, rows, self._rotary.factors(positions, rows.dtype), attend)
        return made


def read_own_layers(folder: Path, found: LastLayers) -> OwnLayers:
    """The layers with the target's weights, frozen, as float32.

    Raises:
        ConfigurationError: a weight cannot be read.
    """
    with torch.device("meta"):
        layers = OwnLayers(found.config)
    tensors: dict[str, torch.Tensor] = {}
    with reading(f"read the target's layers at {folder}", about=folder), WeightFiles(folder) as files:
        for name, public in found.names.items():
            tensors[name] = files.numbers(public).to(torch.float32, copy=True)
        layers.load_state_dict(tensors, assign=True)
    return layers.requires_grad_(False)
