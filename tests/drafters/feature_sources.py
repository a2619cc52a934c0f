"""Small drafters of hidden states with made-up states, and what they say by plain passes over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.heads.eagle.head import FeatureHead, causal
from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.session import FeatureSession
from services.drafter.heads.state_head import HeadOutput, StateHead
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession, StepReport
from speculation.types import Features, TokenTree

SIZE, VOCABULARY = 32, 60
EAGLE = HeadConfig(
    family="eagle",
    hidden_size=SIZE,
    target_hidden_size=SIZE,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    fc_bias=True,
)
FSPAD = replace(EAGLE, family="fspad", sampler=True, two_outputs=True)
EAGLE3 = replace(
    EAGLE, family="eagle3", state_layers=(0, 1, -1), fc_bias=False, output_norm=True, own_output=True, num_key_value_heads=4
)
HEADS = {"eagle": EAGLE, "fspad": FSPAD, "eagle3": EAGLE3}


def head(config: HeadConfig, ids: Sequence[int] | None = None) -> FeatureHead:
    torch.manual_seed(1)
    # In float64, so that rounding decides nothing.
    rows = TargetRows.of(torch.randn(config.vocab_size, config.target_hidden_size).double())
    if ids is not None:
        config = replace(config, draft_vocab_size=len(ids))
    made = FeatureHead(config, rows, None if ids is None else torch.tensor(ids))
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=1.5 if "lm_head" in name else 0.2)
    return made.double().requires_grad_(False)


def source(config: HeadConfig = EAGLE, *, ids: Sequence[int] | None = None, **given: Any) -> FeatureSource:
    return FeatureSource("eagle", head(config, ids), **{"window": 1000, **given})


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def states(positions: range, config: HeadConfig = EAGLE, seed: int = 0) -> Features:
    """Made-up states; those of a position are always the same."""
    rows = [np.random.default_rng((seed, position)).normal(size=config.state_size) for position in positions]
    data = np.array(rows, dtype="<f2").tobytes()
    return Features(
        data=data,
        rows=len(positions),
        width=config.state_size,
        dtype="float16",
        start=positions.start,
        layers=config.state_layers,
    )


def known(*ranges: range, config: HeadConfig = EAGLE, seed: int = 0) -> KnownStates:
    found = KnownStates()
    for each in ranges:
        found.add(states(each, config, seed))
    return found


def opening(tokens: Sequence[int], **fields: Any) -> OpenSession:
    return OpenSession(
        session_id="s", prompt_length=fields.pop("prompt_length", len(tokens)), tokens=tuple(tokens), sources=("eagle",),
        max_nodes=8, **fields,
    )  # fmt: skip


def report(session: FeatureSession, committed: Sequence[int]) -> None:
    session.observe(
        StepReport(
            session_id="s", committed=tuple(committed), length=len(session.tokens) + len(committed), prefix_hash=0,
            accepted_path=(), max_nodes=8,
        )
    )  # fmt: skip


def draft(own: FeatureSource, session: FeatureSession, states: KnownStates, max_nodes: int = 12, **more: Any) -> TokenTree:
    return own.draft([DraftWanted(session=session, max_nodes=max_nodes, states=states, **more)])[0]


def fresh(own: FeatureSource, tokens: Sequence[int], states: KnownStates, max_nodes: int = 12) -> TokenTree:
    """The draft of a session opened with everything."""
    return draft(own, own.open(opening(tokens, prompt_length=1)), states, max_nodes)


def same(one: TokenTree, other: TokenTree) -> None:
    assert (one.tokens, one.parents, one.sources) == (other.tokens, other.parents, other.sources)
    assert one.scores == pytest.approx(other.scores, rel=1e-4)


def after(own: StateHead, tokens: Sequence[int], states: KnownStates, path: Sequence[int]) -> HeadOutput:
    """What the head says after the text and ``path``: [h] each. Plainly, all rows anew, with its own states on the path."""
    rows = [states.of(position, own.state_layers) for position in range(len(tokens) - 1)]
    numbers = [np.frombuffer(row.data, dtype="<f2").astype(np.float64) for row in rows if row is not None]
    assert len(numbers) == len(rows)
    given = own.fuse(torch.from_numpy(np.array(numbers)).to(own.missing_state))
    whole = [*tokens, *path]
    for count in range(len(path) + 1):
        embeddings = own.embed(torch.tensor(whole[1 : len(tokens) + count]))
        positions = torch.arange(len(embeddings))
        made = own(embeddings[None], given[None], positions[None], causal)
        given = torch.cat((given, made.state[0, -1:]))
    return HeadOutput(hidden=made.hidden[0, -1], state=made.state[0, -1])


def log_q(own: StateHead, tokens: Sequence[int], states: KnownStates, path: Sequence[int] = ()) -> torch.Tensor:
    """[draft vocabulary], log-probabilities of the token after the text and ``path``."""
    return own.logits(after(own, tokens, states, path).hidden, own.vocabulary).log_softmax(-1)


def counted(own: FeatureSource) -> list[int]:
    """The rows of each pass, from now on."""
    passes: list[int] = []
    own._head.register_forward_pre_hook(lambda module, given: passes.append(given[0].shape[1]))
    return passes
