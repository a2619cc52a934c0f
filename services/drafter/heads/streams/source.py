"""Speculative streams as a source of drafts: from the target's own pass, or in two steps.

In one pass (Bhendawade et al., 2402.11131, section 3.1.2), the target computes the streams of the rows at which its walk is
likely to end, and reports those of the row where it ended. In two steps, one more reading of the target's last layers brings
the main rows of newly committed positions up to date and computes the streams of the last one alone. What the target reports
decides: streams, if it computed them; otherwise the states that they begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.drafter.config import DrafterConfig
from services.drafter.heads.cache import CacheShape, PassRows
from services.drafter.heads.canary.levels import check_levels_at
from services.drafter.heads.levels import LevelForm, LevelTrees
from services.drafter.heads.pass_attention import PassAttention
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import CommittedRows, Due, FeatureSession, in_one_call, state_numbers
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.streams import Streams
from services.drafter.sessions.cache_room import MOST_BYTES, CacheRoom
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession
from speculation.types import EMPTY_TREE, TokenTree

NAME = "streaming"


def make(config: DrafterConfig) -> StreamSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    use_threads()
    streams = load_streams(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    multiply_by_kernels(streams.output, trained)
    check_levels_at(streams, folder, target, asked_for=trained.asked_for)
    return StreamSource(streams, window=trained.window, form=LevelForm.of(trained))


class StreamSource:
    """Implements ``ModelSource``.

    Args:
        window: most committed rows that a row attends to. Beyond it, main rows differ a little from the target's own.
        form: of the trees.
    """

    def __init__(self, streams: Streams, *, window: int, form: LevelForm | None = None) -> None:
        self._streams = streams
        self._ahead = streams.config.num_streams
        self._trees = LevelTrees(NAME, streams, self._ahead, form or LevelForm())
        self._room = CacheRoom(MOST_BYTES)
        embeddings, layers = streams.stream_embeddings, streams.own.config
        # Stands where the target's state is not known: a row of zeros adds nothing, and little is seen of it.
        self._missing = torch.zeros_like(embeddings[0])
        self._in_pass = streams.config.layers_in_pass
        self._like = torch.zeros_like(embeddings).flatten()
        self._shape = CacheShape(
            layers=layers.num_layers,
            heads=layers.num_key_value_heads,
            width=layers.head_dim,
            window=min(window, layers.window or window),
            dtype=embeddings.dtype,
            device=embeddings.device,
        )

    def open(self, message: OpenSession) -> FeatureSession:
        extra = self._streams.output.beyond(message.tokens[: message.prompt_length])
        return FeatureSession(message, self._shape, extra)

    @torch.inference_mode()
    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        trees: list[TokenTree | None] = [None if wanted.max_nodes else EMPTY_TREE for wanted in batch]
        hidden = self._from_passes(batch)
        hidden |= self._by_two_steps([(place, wanted) for place, wanted in enumerate(batch) if place not in hidden])
        if hidden:
            drafted = self._trees.grow([batch[place] for place in hidden], torch.cat(list(hidden.values())))
            for place, tree in zip(hidden, drafted, strict=True):
                trees[place] = tree
        return trees

    def _from_passes(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        """[gamma, h] of each place in ``batch`` whose last row had streams in the target's pass."""
        found = {}
        for place, wanted in enumerate(batch):
            row = wanted.states.of(len(wanted.session.tokens) - 2, self._in_pass) if wanted.max_nodes else None
            # All zeros where the row had none.
            if row is not None and (numbers := state_numbers(row, self._in_pass, self._like)).any():
                found[place] = numbers.view(self._ahead, -1)
        return found

    def _by_two_steps(self, others: Sequence[tuple[int, DraftWanted]]) -> dict[int, torch.Tensor]:
        """The same of those whose streams can be computed here."""
        layers = (self._streams.config.state_layer,)
        due = [
            Due(place, wanted.session, rows)
            for place, wanted in others
            if wanted.max_nodes
            and _may_know(wanted, layers)
            and (rows := wanted.session.rows_wanted(wanted.states, layers, self._missing)) is not None
        ]
        if not due:
            return {}
        ready, hidden = self._compute(due)
        self._room.used(each.session.cache for each in due)
        # Without the target's state of the last row there is nothing to begin with.
        return {each.place: own for each, own in zip(ready, hidden, strict=True) if each.rows.known[-1]}

    def forget(self, tenant: str) -> None:
        """Nothing is kept beyond a session."""

    def _compute(self, due: Sequence[Due]) -> tuple[list[Due], torch.Tensor]:
        """One pass over main rows, and the streams of each session whose main rows are complete with it.

        Returns:
            These sessions, and [sessions, gamma, h], what the output layer reads of their streams. The others have too many
            rows for one call, and must be asked for again.
        """
        pieces = [(due[index], piece) for index, piece in in_one_call([each.rows for each in due])]
        ready = [each for each, piece in pieces if len(piece) == len(each.rows)]
        main = [self._main(each, piece) for each, piece in pieces]
        try:
            hidden = self._pass([piece for _, piece in pieces], main, ready)
        except BaseException:
            # Rows count as computed, and are not.
            for each, _ in pieces:
                each.session.cache.clear()
            raise
        return ready, hidden

    def _main(self, each: Due, piece: CommittedRows) -> PassRows:
        cache = each.session.cache
        cache.reserve(int(piece.positions[-1]) + 1, self._ahead)
        part = cache.committed(piece.positions)
        # Streams stand behind these rows, in the same pass.
        each.session.computed(piece)
        return part

    def _pass(self, pieces: Sequence[CommittedRows], main: Sequence[PassRows], ready: Sequence[Due]) -> torch.Tensor:
        """[ready, gamma, h], what the output layer reads of their streams."""
        ahead = self._ahead
        own_and_before = np.tri(ahead, dtype=np.bool_)
        behind = [each.session.cache.tree(own_and_before) for each in ready]
        begins = [each.rows.states[-1] for each in ready]
        rows = torch.cat([piece.states for piece in pieces])
        positions = [piece.positions for piece in pieces]
        if ready:
            rows = torch.cat((rows, self._streams.inputs(torch.stack(begins)).flatten(0, 1)))
            positions += [each.rows.positions[-1] + 1 + np.arange(ahead) for each in ready]
        places = torch.from_numpy(np.concatenate(positions)).to(rows.device)
        streams = ahead * len(ready)
        # Main rows come first in every layer, so that streams find their keys.
        hidden = self._streams(rows[None], places[None], PassAttention([*main, *behind]), streams=streams)
        found: torch.Tensor = hidden[0, len(rows) - streams :].view(len(ready), ahead, -1)
        return found


def _may_know(wanted: DraftWanted, layers: Sequence[int]) -> bool:
    """Whether the target reports, or may yet report, the state that the last row's streams begin with."""
    last = len(wanted.session.tokens) - 2
    return not wanted.states.known(last, last + 1) or wanted.states.of(last, layers) is not None
