"""Sessions of a draft model, and its target's own choices by plain passes over the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.config import DrafterConfig, StopConfig, TrainedConfig
from services.drafter.draft_model.session import LmSession
from services.drafter.draft_model.source import DraftModelSource, make
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from services.verifier.choosing.processors import build_truncation
from speculation.choose import choose
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import ROOT, children
from speculation.types import SamplingParams, TokenTree

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 40, 41, 42]
VOCAB = 320


def config(target: Path, draft: Path, **trained: object) -> DrafterConfig:
    return DrafterConfig(trained=TrainedConfig(checkpoints={"draft_model": draft}, target=target, **trained))  # type: ignore[arg-type]


def source_of(target: Path, draft: Path | None = None, *, length: int = 4, **trained: object) -> DraftModelSource:
    return make(config(target, draft or target, **{"stop": StopConfig(num_assistant_tokens=length), **trained}))


def opened(source: DraftModelSource, tokens: Sequence[int], prompt_length: int = 0, **message: object) -> LmSession:
    asked = OpenSession(
        session_id="s",
        tokens=tuple(tokens),
        prompt_length=prompt_length or len(tokens),
        sources=("draft_model",),
        max_nodes=64,
        **message,  # type: ignore[arg-type]
    )
    return source.open(asked)


def wanted(session: LmSession, max_nodes: int = 8, least: float = 0.0) -> DraftWanted:
    return DraftWanted(session=session, max_nodes=max_nodes, min_probability=least, states=KnownStates())


def commit(session: LmSession, tokens: Sequence[int]) -> None:
    session.observe(
        StepReport(
            session_id="s",
            committed=tuple(tokens),
            length=len(session.tokens) + len(tokens),
            prefix_hash=0,
            accepted_path=(),
            max_nodes=8,
        )
    )


class Target:
    """A model's own choices, by plain passes over the whole text."""

    def __init__(self, folder: Path, **sampling: object) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})  # type: ignore[arg-type]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return found

    def choices(self, tokens: Sequence[int]) -> list[int]:
        """Its choice after each of the tokens."""
        truncation = build_truncation(self.params)
        found = []
        for position, row in enumerate(self.logits(tokens), 1):
            if self.params.temperature > 0:
                row = row / self.params.temperature
                row = row if truncation is None else truncation(row, ())
            found.append(choose(row, self.params, self.params.seed, position))
        return found

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(self.choices(text)[-1])
        return text[len(tokens) :]


def chain_of(tree: TokenTree) -> list[int]:
    """The path of first children, which are the likeliest."""
    below, node, found = children(tree), ROOT, []
    while node in below:
        node = below[node][0]
        found.append(tree.tokens[node])
    return found


def same(left: TokenTree, right: TokenTree) -> bool:
    return (left.tokens, left.parents) == (right.tokens, right.parents) and left.scores == pytest.approx(
        right.scores, rel=1e-3
    )


def refused(target: Path | None, draft: Path, **trained: object) -> str:
    """Why this is no draft model for the target."""
    with pytest.raises(ConfigurationError) as caught:
        make(DrafterConfig(trained=TrainedConfig(checkpoints={"draft_model": draft}, target=target, **trained)))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message
