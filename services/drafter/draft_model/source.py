"""A small causal language model that drafts for many requests at once (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.draft_model.ahead import MOST_NODES, DraftedOutcomes, draft_outcomes
from services.drafter.draft_model.chain import DraftedChain, DraftLimits
from services.drafter.draft_model.language_model import LanguageModel
from services.drafter.draft_model.loading import check_folder, load_draft_model, quietly
from services.drafter.draft_model.mask import mask_of
from services.drafter.draft_model.model import DraftLM
from services.drafter.draft_model.parallel import ParallelDraft
from services.drafter.draft_model.session import LmSession
from services.drafter.draft_model.text_cache import NewRows, TextCache
from services.drafter.draft_model.vocabulary_map import VocabularyMap, map_vocabularies
from services.drafter.sessions.cache_room import MOST_BYTES, CacheRoom
from services.drafter.sessions.drawn_proposals import Draw, draw_with
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftWanted
from services.drafter.stopping.interface import StopPolicy
from services.drafter.stopping.policies import make_stop
from services.model_files.folder import read_json, text_config
from services.model_files.weights.files import check_shared
from speculation import limits
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from speculation.tree import prune
from speculation.types import EMPTY_TREE, TokenTree

log = logging.getLogger(__name__)

NAME = "draft_model"
# Rows of texts that one call computes beside sessions that draft, so that a long prompt delays these by about a pass of the
# target; and where nobody else waits.
_ROWS_BESIDE, _ROWS_ALONE = 256, 1024
# A session with at most so many rows to compute counts as one that drafts. A step commits a few tokens.
_FEW = 32
# Policies under which a draft's length is known before it begins.
_PLANNED = ("static", "heuristic", "heuristic_transient")


def make(config: DrafterConfig) -> DraftModelSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: there is no such model, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    if trained.device == "cpu":
        # Before the weights are read: reading is parallel too, and a team of threads stays with the thread that had one.
        use_threads()
    check_folder(folder)
    check_shared(folder, target)
    config_file = read_json(folder / "config.json", "draft model")
    mask = mask_of(config_file, str(folder))
    if mask is not None and trained.stop.policy not in _PLANNED:
        raise ConfigurationError(
            field="drafter.stop_policy",
            value=trained.stop.policy,
            given=f"but the draft model at {folder} guesses all tokens in one pass",
            allowed=f"one of {', '.join(_PLANNED)}, which plan a length",
        )
    vocabulary = map_vocabularies(folder, target)
    kept = None if vocabulary.kept is None else vocabulary.kept.tolist()
    lm = _by_kernels(trained, folder, target, kept)
    if lm is None:
        lm = DraftLM(load_draft_model(folder, target, device=trained.device, dtype=trained.held_dtype), folder, kept)
    positions = text_config(config_file).get("max_position_embeddings")
    return DraftModelSource(
        lm,
        vocabulary,
        make_stop(trained.stop, folder, target),
        steps=trained.num_steps,
        branches=trained.eagle_topk,
        mask=mask,
        longest=min(trained.window, positions if isinstance(positions, int) else trained.window),
    )


def _by_kernels(config: TrainedConfig, folder: Path, target: Path, kept: Sequence[int] | None) -> LanguageModel | None:
    """The model over the target's own kernels, if it is one that they compute."""
    if config.draft_kernels is None or config.device != "cpu" or config.dtype not in ("float32", "int8"):
        return None
    try:
        with quietly():
            made: LanguageModel = config.draft_kernels(folder, target, kept)
        return made
    except ConfigurationError as error:
        log.info("the draft model at %s is computed by torch, which takes longer: %s", folder, error)
        return None


@dataclass(slots=True)
class _Drafting:
    """A session's draft in a call; ``rows`` are those of the coming pass."""

    index: int
    session: LmSession
    chain: DraftedChain | ParallelDraft | None
    rows: NewRows | None


class DraftModelSource:
    """Implements ``ModelSource`` and ``DraftsAhead``.

    A call makes one pass for each level of its drafts, over the rows of all sessions. The first one also computes the
    text that is not in a session's cache: what was committed since its last draft, and the last token of a chain that was
    accepted whole. Long texts take several calls, in which their sessions have no draft.

    Args:
        longest: most rows of a session, drafts included.
        steps: most tokens of a chain, whatever ``stop`` says; None: no other limit.
        branches: as in ``DraftLimits``.
        mask: its token that stands where one is to be guessed, so that one pass guesses all levels; None: one pass each.
    """

    def __init__(
        self,
        lm: LanguageModel,
        vocabulary: VocabularyMap,
        stop: StopPolicy,
        *,
        longest: int,
        steps: int | None = None,
        branches: int | None = None,
        mask: int | None = None,
        draw: Draw | None = None,
    ) -> None:
        self._lm = lm
        self._vocabulary = vocabulary
        self._stop = stop
        self._longest = longest
        self._steps = steps or limits.MAX_TREE_NODES
        self._branches = branches
        self._mask = mask
        self._draw = draw or draw_with()
        self._room = CacheRoom(MOST_BYTES)

    def with_stop(self, stop: StopPolicy) -> DraftModelSource:
        """The same model, whose chains end by another policy."""
        other = copy(self)
        other._stop = stop
        other._room = CacheRoom(self._room.most_bytes)
        return other

    @property
    def targets(self) -> NDArray[np.int64] | None:
        """[kept ids], the target's id of each logit; None: they are the same."""
        return self._vocabulary.targets

    def logits_behind(self, text: Sequence[int], count: int) -> torch.Tensor:
        """What the model says behind each of the last ``count`` tokens of a text: [count, kept ids], float32.

        Raises:
            ConfigurationError: it has a tokeniser of its own, in which the places are others.
        """
        if not self._vocabulary.is_targets:
            raise ConfigurationError(
                "the draft model has a tokeniser of its own: must have the target's", about="the draft model"
            )
        rows = TextCache(self._lm.new_rows())
        try:
            (found,) = self._lm.logits([rows.add_text(text, count)])
        finally:
            rows.clear()
        return found

    def open(self, message: OpenSession) -> LmSession:
        return LmSession(message, self._lm.new_rows(), self._vocabulary, self._stop.open(message))

    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = [EMPTY_TREE] * len(batch)
        drafting: list[_Drafting] = []
        try:
            self._begin(batch, drafting, trees)
            while running := [(each, each.rows) for each in drafting if each.rows is not None]:
                found = self._lm.logits([rows for _, rows in running])
                for (each, _), logits in zip(running, found, strict=True):
                    each.rows = None if each.chain is None else each.chain.take(logits)
        except Exception:
            # Some rows were entered and never computed.
            for each in drafting:
                each.session.cache.clear()
            raise
        for each in drafting:
            if each.chain is not None:
                made = each.chain.made()
                each.session.drafted(made)
                trees[each.index] = made.tree
        self._room.used(each.session.cache for each in drafting)
        return trees

    def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
        """As ``DraftsAhead.draft_ahead``. Drafts that are drawn from q are not made ahead, nor those of masks."""
        outcomes = {index: found for index, wanted in enumerate(batch) if (found := self._outcomes(wanted)) is not None}
        try:
            draft_outcomes(self._lm, list(outcomes.values()), go_on)
        except Exception:
            for each in outcomes.values():
                each.session.cache.clear()
            raise
        self._room.used(each.session.cache for each in outcomes.values())
        return [outcomes[index].found() if index in outcomes else [] for index in range(len(batch))]

    def _outcomes(self, wanted: AheadWanted) -> DraftedOutcomes | None:
        session = cast(LmSession, wanted.session)
        made = session.draft
        if made is None or not made.tree or session.sampled or self._mask is not None:
            return None
        # As long as the policy has let the last one get.
        length = min(len(made.chain), wanted.max_nodes)
        rows = MOST_NODES + wanted.most * length * (self._branches or 1)
        text = session.behind(self._longest, min(rows, self._longest // 2))
        if not text or len(text) > _FEW:
            return None
        may = DraftLimits(nodes=wanted.max_nodes, length=length, branches=self._branches, least=wanted.min_probability)
        return DraftedOutcomes(
            session=session,
            tree=made.tree,
            text=text,
            most=wanted.most,
            make=lambda outcome, row: DraftedChain(session, may, NAME, self._draw, assumed=outcome, root=row),
        )

    def forget(self, tenant: str) -> None:
        """A session's rows are its own, and go when it is closed."""

    def _begin(self, batch: Sequence[DraftWanted], drafting: list[_Drafting], trees: list[TokenTree | None]) -> None:
        """Add to ``drafting`` the rows of the first pass: of all sessions with few, of others as far as there is room.

        In ``trees`` goes what was drafted ahead, and None for sessions whose text takes further calls.
        """
        waiting: list[tuple[int, DraftWanted, int, list[int]]] = []
        for index, wanted in enumerate(batch):
            session = cast(LmSession, wanted.session)
            length = self._length(session, wanted.max_nodes)
            if length and (made := session.made_ahead()) is not None:
                trees[index] = tree = prune(made.tree, wanted.max_nodes, wanted.max_nodes)
                session.drafted(replace(made, tree=tree))
            elif length:
                spare = length * (self._branches or 1)
                waiting.append((index, wanted, length, session.behind(self._longest, min(spare, self._longest // 2))))
        waiting = sorted((each for each in waiting if each[3]), key=lambda each: len(each[3]))
        room = _ROWS_BESIDE if waiting and len(waiting[0][3]) <= _FEW and len(waiting[-1][3]) > _FEW else _ROWS_ALONE
        for index, wanted, length, text in waiting:
            session = cast(LmSession, wanted.session)
            count = len(text) if len(text) <= _FEW else min(len(text), room)
            whole = count == len(text)
            if not whole:
                trees[index] = None
            if count == 0:
                continue
            if len(text) > _FEW:
                room -= count
            may = DraftLimits(nodes=wanted.max_nodes, length=length, branches=self._branches, least=wanted.min_probability)
            masks = () if self._mask is None or not whole else (self._mask,) * (length - 1)
            rows = session.cache.add_text(text[:count], int(whole), masks)
            form = DraftedChain if self._mask is None else ParallelDraft
            chain = form(session, may, NAME, self._draw) if whole else None
            drafting.append(_Drafting(index, session, chain, rows))

    def _length(self, session: LmSession, max_nodes: int) -> int:
        """The most tokens of a session's chain; 0: it wants no draft."""
        # The policy is asked only if there is to be a draft.
        return min(session.begin(), max_nodes, self._steps, self._longest // 4) if max_nodes else 0
