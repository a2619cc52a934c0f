"""Gemma 4's assistants say what transformers' own say, whatever the target: its keys and values are made anew of its states."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cluster.models.drafters import linear_kernels
from services.drafter.heads.assistant.files import load_assistant
from services.drafter.heads.assistant.head import AssistantHead
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.products import HeadProducts
from services.drafter.sessions.known_states import KnownStates
from speculation.tree import ROOT, depths, path_to
from tests.drafters.feature_sources import draft, fresh, opening, report, same, text
from tests.tiny_models.assistants import TARGETS, WINDOW, Pair, edit, make_pair
from tests.unit.drafter.heads.test_feature_ahead import ahead

CHAIN = TreeForm(steps=3, width=1)
# Shorter than the window, as long, and longer.
LENGTHS = (2, 5, WINDOW, WINDOW + 1, WINDOW + 2, WINDOW + 3, 30, 31, 40)


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, ordered=request.param == "shared")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("shared"))


def known(pair: Pair, head: AssistantHead, tokens: list[int], without: tuple[int, ...] = ()) -> KnownStates:
    """The target's states of all positions but the last one's."""
    found, whole = KnownStates(), pair.states(tokens, head.state_layers)
    for at in range(len(tokens) - 1):
        if at not in without:
            found.add(whole.part(at, at + 1))
    return found


def spoken(head: AssistantHead, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Logits that are asked for from now on, one row each."""
    rows: list[torch.Tensor] = []
    plain = head.logits

    def logits(hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        made = plain(hidden, vocabulary)
        rows.extend(made.clone())
        return made

    monkeypatch.setattr(head, "logits", logits)
    return rows


@pytest.mark.examples(3)
def test_it_says_what_transformers_say_at_every_position(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_assistant(pair.folder, pair.target)
    said, tokens = spoken(head, monkeypatch), text(40, seed=2)
    own = FeatureSource("mtp", head, window=1000, form=CHAIN)
    session = own.open(opening(tokens[: LENGTHS[0]], prompt_length=1))
    for length, further in pairwise((*LENGTHS, 40)):
        said.clear()
        tree = draft(own, session, known(pair, head, tokens[:length]), 4)
        expected = pair.along(tokens[:length], tree.tokens[:3])
        assert tree.parents == (ROOT, 0, 1, 2)
        assert tree.tokens == tuple(int(each.argmax()) for each in expected)
        for mine, theirs in zip(said, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        report(session, tokens[length:further])


@pytest.mark.examples(3)
@pytest.mark.parametrize("kernels", [False, True])
def test_every_branch_of_a_tree_is_what_transformers_say_of_it(pair: Pair, kernels: bool) -> None:
    head, tokens = load_assistant(pair.folder, pair.target), text(20)
    if kernels:
        if (make := linear_kernels()) is None:
            pytest.skip("no native kernels on this machine")
        head.multiply_by(HeadProducts(make))
    own = FeatureSource("mtp", head, window=1000, ahead=True)
    session = own.open(opening(tokens, prompt_length=1))
    tree = draft(own, session, known(pair, head, tokens))
    assert len(tree) == 12 and max(depths(tree)) > 1
    for node, score in enumerate(tree.scores):
        assert score == pytest.approx(chance(pair, tokens, [tree.tokens[at] for at in path_to(tree, node)]), rel=1e-3)
    # And so are drafts made ahead: from what is fed back, and by the keys that there are.
    (found,) = ahead(own, session)
    assert found
    for each in found:
        above = chance(pair, tokens, each.assumed)
        assert above * each.tree.scores[0] == pytest.approx(
            chance(pair, tokens, (*each.assumed, each.tree.tokens[0])), rel=1e-3
        )


def chance(pair: Pair, tokens: list[int], path: list[int] | tuple[int, ...]) -> float:
    """Of a path, by transformers."""
    logs = [row.log_softmax(-1)[token] for row, token in zip(pair.along(tokens, path[:-1]), path, strict=True)]
    return float(torch.stack(logs).sum().exp())


def test_positions_without_states_are_hidden_until_these_come(shared: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    head, tokens = load_assistant(shared.folder, shared.target), text(WINDOW + 2)
    said = spoken(head, monkeypatch)
    own = FeatureSource("mtp", head, window=1000, form=CHAIN)
    session = own.open(opening(tokens[:WINDOW], prompt_length=1))
    for length, missing in ((WINDOW, (0, 3)), (WINDOW + 1, (3,)), (WINDOW + 2, ())):
        said.clear()
        tree = draft(own, session, known(shared, head, tokens[:length], missing), 4)
        for mine, theirs in zip(said, shared.along(tokens[:length], tree.tokens[:3], missing), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        report(session, tokens[length : length + 1])


def test_long_texts_take_turns_and_short_windows_forget(shared: Pair) -> None:
    head, tokens = load_assistant(shared.folder, shared.target), text(400)
    own, held = FeatureSource("mtp", head, window=40), known(shared, head, tokens)
    whole = FeatureSource("mtp", head, window=1000)
    first, second = (own.open(opening(tokens[:size], prompt_length=1)) for size in (400, 20))
    # The session with few rows drafts at once.
    assert draft(own, second, known(shared, head, tokens[:20]))
    tree = draft(own, first, held)
    assert tree is not None and tree.tokens != fresh(whole, tokens, held).tokens
    assert first.cache.end - first.cache.first <= 400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_drafts_in_halves(shared: Pair, dtype: torch.dtype) -> None:
    head, plain = (load_assistant(shared.folder, shared.target, dtype=each) for each in (dtype, torch.float32))
    tokens = text(20)
    held = known(shared, head, tokens, (4,))
    half, whole = (FeatureSource("mtp", each, window=1000) for each in (head, plain))
    one, other = fresh(half, tokens, held), fresh(whole, tokens, held)
    assert len(set(one.tokens) & set(other.tokens)) > len(other.tokens) / 2


def test_it_is_known_by_its_tensors_and_says_whose_states_it_reads(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "shared")
    early, found = inspect(pair.folder, None), inspect(pair.folder, pair.target)
    assert (early.source, found.source) == ("mtp", "mtp")
    # The last of the target's first four layers, which make keys of their own: 2 of sliding and 3 of full attention.
    assert found.layers == (1, 2, -1)
    assert found.numbers == early.numbers + 64 * 2 * (2 * 16 + 2 * 32)
    edit({"model_type": "other", "architectures": None})(pair)
    assert inspect(pair.folder, pair.target) == found


def test_tensors_that_nobody_reads_may_come_along(tmp_path: Path) -> None:
    """Keys of its own, which transformers leaves unread, and an output layer that is not tied."""
    pair = make_pair(tmp_path, "shared")
    tokens, rows = text(12), torch.randn(320, 32)
    tree = fresh(*_source(pair, tokens))
    edit(model__layers__0__self_attn__k_proj__weight=torch.randn(32, 32))(pair)
    same(fresh(*_source(pair, tokens)), tree)
    edit({"tie_word_embeddings": False}, lm_head__weight=rows)(pair)
    other = fresh(*_source(pair, tokens))
    assert other.tokens != tree.tokens
    anew = Pair(pair.folder, pair.target)
    assert int(anew.along(tokens, ())[0].argmax()) == other.tokens[0]


def _source(pair: Pair, tokens: list[int]) -> tuple[FeatureSource, list[int], KnownStates]:
    head = load_assistant(pair.folder, pair.target)
    return FeatureSource("mtp", head, window=1000), tokens, known(pair, head, tokens)
