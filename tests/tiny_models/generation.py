"""A model's small files with a generation config, and what a verifier would say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.model_files.generation_config import FILE
from speculation.messages import VerifierCard
from speculation.types import SamplingDefaults

PROMPT = (40, 41, 42, 40, 41, 43, 40, 41)
# Of tiny models.
VOCABULARY = 320


def write(folder: Path, **content: Any) -> Path:
    (folder / FILE).write_text(json.dumps({"eos_token_id": 0, **content}))
    return folder


def card(defaults: SamplingDefaults, max_model_len: int = 512) -> VerifierCard:
    return VerifierCard(
        model="m", max_model_len=max_model_len, vocab_size=VOCABULARY, running=0, waiting=0, free_blocks=1, total_blocks=1, bit_exact=True,
        defaults=defaults,
    )  # fmt: skip
