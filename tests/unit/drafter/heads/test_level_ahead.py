"""Drafts that models of several guesses make ahead: the levels that an outcome left, whose paths the draft could have had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.blocks.source import BlockSource
from services.drafter.heads.eagle.parallel import ParallelSource
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.levels import LevelForm
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.source import MedusaSource
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from speculation.messages import OpenSession, StepReport
from speculation.tree import depths, follow, path_to, validate
from speculation.types import Features, TokenTree
from tests.tiny_models import block_checkpoints as made
from tests.tiny_models import head_checkpoints
from tests.tiny_models.block_checkpoints import READ
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, HeadCheckpoint
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_medusa

TEXT = (17, 5, 40, 41, 8, 9, 250)
BLOCKS: dict[str, Callable[[], HeadCheckpoint]] = {
    "dflash": made.dflash,
    "dspark": made.dspark,
    "dspark's rnn": lambda: made.dspark(kind="rnn"),
    "domino": made.domino,
    "dflash2": made.dflash2,
}
KINDS = [*BLOCKS, "medusa", "peagle"]
# Of the target, whose states a kind reads; a block drafter else.
LAYERS_READ = {"medusa": (-1,), "peagle": (1, 3, 4)}
Source = BlockSource | MedusaSource | ParallelSource


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture
def folder(tmp_path: Path, target: Path, request: pytest.FixtureRequest) -> Path:
    """Of the checkpoint of the kind that the test asks for."""
    torch.manual_seed(1)
    kind: str = request.getfixturevalue("kind")
    if kind == "medusa":
        return make_medusa(target, tmp_path)
    return (head_checkpoints.peagle() if kind == "peagle" else BLOCKS[kind]()).write(tmp_path)


def source(kind: str, folder: Path, target: Path, *, ahead: bool = True, width: int = 6) -> Source:
    if kind == "medusa":
        return MedusaSource(load_medusa(folder, target), form=LevelForm(width=width), ahead=ahead)
    if kind == "peagle":
        return ParallelSource(load_head(folder, target), window=1000, form=LevelForm(width=width), ahead=ahead)
    return BlockSource(load_blocks(folder, target), window=1000, form=LevelForm(width=width), ahead=ahead)


def known(kind: str) -> KnownStates:
    """Of all committed positions but the last."""
    found, layers = KnownStates(), LAYERS_READ.get(kind, tuple(READ))
    for position in range(len(TEXT) - 1):
        numbers = torch.randn(len(layers) * HIDDEN, generator=torch.Generator().manual_seed(position))
        data = numbers.numpy().astype("<f4").tobytes()
        found.add(Features(data=data, rows=1, width=len(numbers), dtype="float32", start=position, layers=layers))
    return found


def drafted(own: Source, kind: str, nodes: int, **opened: object) -> tuple[object, TokenTree]:
    """A session and its draft."""
    message = OpenSession(session_id="s", tokens=TEXT, prompt_length=1, sources=(kind,), max_nodes=nodes, **opened)  # type: ignore[arg-type]
    session = own.open(message)
    (tree,) = own.draft([DraftWanted(session=session, max_nodes=nodes, states=known(kind))])
    assert tree is not None
    return session, tree


def asked(session: object) -> AheadWanted:
    return AheadWanted(session=session, max_nodes=9, min_probability=0.0, most=3)


def ahead(own: Source, session: object) -> list[Ahead]:
    (found,) = own.draft_ahead([asked(session)], lambda: True)
    return found


def scores(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """By path."""
    return {tuple(tree.tokens[each] for each in path_to(tree, node)): tree.scores[node] for node in range(len(tree))}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_what_a_larger_draft_holds(kind: str, folder: Path, target: Path) -> None:
    own = source(kind, folder, target)
    session, tree = drafted(own, kind, 5)
    found = ahead(own, session)
    assert len(found) == 3
    _, large = drafted(source(kind, folder, target, ahead=False, width=60), kind, 1500)
    expected, compared = scores(large), 0
    for each in found:
        *path, _ = each.assumed
        assert follow(tree, each.assumed) == len(path), "the draft has this path, and not the token behind it"
        validate(each.tree, vocab_size=1 << 20, max_nodes=9, sources=["dflash", "medusa", "peagle"])
        for behind, score in scores(each.tree).items():
            if (whole := expected.get((*each.assumed, *behind))) is not None:
                assert score == pytest.approx(whole / expected[each.assumed], rel=1e-3)
                compared += 1
    assert compared >= 12
    assert max(max(depths(each.tree), default=0) for each in found) >= 2
    # The likeliest of what the draft leaves over.
    chances = [expected[each.assumed] for each in found]
    assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize("kind", ["dspark", "medusa"])
def test_once_for_a_text_and_only_if_asked_for(kind: str, folder: Path, target: Path) -> None:
    own = source(kind, folder, target)
    session, _ = drafted(own, kind, 5)
    assert ahead(own, session)
    assert ahead(own, session) == []
    session, _ = drafted(own, kind, 5)
    session.observe(  # type: ignore[attr-defined]
        StepReport(session_id="s", committed=(3,), length=len(TEXT) + 1, prefix_hash=0, accepted_path=(), max_nodes=5)
    )
    assert ahead(own, session) == [], "the draft was for another text"
    drawn, _ = drafted(own, kind, 5, temperature=1.0, sampled=True)
    assert ahead(own, drawn) == [], "what is drawn from q must not be chosen by what comes"
    unasked = source(kind, folder, target, ahead=False)
    session, _ = drafted(unasked, kind, 5)
    assert ahead(unasked, session) == []


@pytest.mark.parametrize("kind", ["dspark's rnn", "dflash", "medusa"])
def test_sessions_that_drafted_together_or_apart_draft_ahead_together(kind: str, folder: Path, target: Path) -> None:
    own, texts = source(kind, folder, target), (TEXT, (*TEXT[:-1], 3), (*TEXT[:-1], 77))
    expected = [ahead(own, session) for (session,) in (together(own, kind, text) for text in texts)]
    one, other = together(own, kind, *texts[:2])
    (apart,) = together(own, kind, texts[2])
    found = own.draft_ahead([asked(each) for each in (apart, own.open(opening(kind)), one, other)], lambda: True)
    assert found.pop(1) == [], "it has not drafted"
    for several, alone in zip(found, (expected[2], *expected[:2]), strict=True):
        assert [each.assumed for each in several] == [each.assumed for each in alone]
        for left, right in zip(several, alone, strict=True):
            assert left.tree.tokens == right.tree.tokens
            assert np.allclose(left.tree.scores, right.tree.scores, rtol=1e-4)


def together(own: Source, kind: str, *texts: tuple[int, ...]) -> list[object]:
    """Sessions that drafted in one batch."""
    sessions: list[object] = [own.open(opening(kind, text)) for text in texts]
    own.draft([DraftWanted(session=session, max_nodes=5, states=known(kind)) for session in sessions])
    return sessions


def opening(kind: str, text: tuple[int, ...] = TEXT) -> OpenSession:
    return OpenSession(session_id="s", tokens=text, prompt_length=1, sources=(kind,), max_nodes=5)
