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
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.heads.cache import CacheShape, PassRows
from services.drafter.heads.canary.levels import check_levels_at
from services.drafter.heads.level_source import CommittedLevelSource
from services.drafter.heads.levels import LevelForm, LevelTrees
from services.drafter.heads.pass_attention import PassAttention
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.heads.session import CommittedRows, Due, in_one_call, state_numbers
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.streams import Streams
from services.drafter.sessions.cache_room import MOST_BYTES
from services.drafter.sessions.thread import use_threads
from services.drafter.sources.interfaces import DraftWanted

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


class StreamSource(CommittedLevelSource):
    """Drafts by streams of the target's pass, or by two steps. Its committed rows are main rows.

    Args:
        window: most committed rows that a row attends to. Beyond it, main rows differ a little from the target's own.
        form: of the trees.
    """

    def __init__(self, streams: Streams, *, window: int, form: LevelForm | None = None) -> None:
        self._streams = streams
        self._ahead = streams.config.num_streams
        embeddings, layers = streams.stream_embeddings, streams.own.config
        self._in_pass = streams.config.layers_in_pass
        self._like = torch.zeros_like(embeddings).flatten()
        super().__init__(
            streams.output,
            LevelTrees(NAME, streams, self._ahead, form or LevelForm()),
            layers=(streams.config.state_layer,),
            # A row of zeros adds nothing, and little is seen of it.
            missing=torch.zeros_like(embeddings[0]),
            shape=CacheShape(
                layers=layers.num_layers,
                heads=layers.num_key_value_heads,
                width=layers.head_dim,
                window=min(window, layers.window or window),
                dtype=embeddings.dtype,
                device=embeddings.device,
            ),
            most_bytes=MOST_BYTES,
        )

    @override
    def _guess(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        found = self._from_passes(batch)
        due = [
            Due(place, wanted.session, rows)
            for place, wanted in enumerate(batch)
            if place not in found
            and wanted.max_nodes
            and _may_know(wanted, self._layers)
            and (rows := wanted.session.rows_wanted(wanted.states, self._layers, self._missing)) is not None
        ]
        return found | self._guess_for(due)

    def _from_passes(self, batch: Sequence[DraftWanted]) -> dict[int, torch.Tensor]:
        """[gamma, h] of each place in ``batch`` whose last row had streams in the target's pass."""
        found = {}
        for place, wanted in enumerate(batch):
            row = wanted.states.of(len(wanted.session.tokens) - 2, self._in_pass) if wanted.max_nodes else None
            # All zeros where the row had none.
            if row is not None and (numbers := state_numbers(row, self._in_pass, self._like)).any():
                found[place] = numbers.view(self._ahead, -1)
        return found

    @override
    def _compute(self, due: Sequence[Due]) -> dict[int, torch.Tensor]:
        """One pass over main rows, and the streams of each session whose main rows are complete with it."""
        pieces = in_one_call(due)
        ready = [each for each, piece in pieces if len(piece) == len(each.rows)]
        with self._computing(pieces, self._ahead) as main:
            hidden = self._pass([piece for _, piece in pieces], main, ready)
        # Without the target's state of the last row there is nothing to begin with.
        return {each.place: own for each, own in zip(ready, hidden, strict=True) if each.rows.known[-1]}

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
        found: torch.Tensor = hidden[0, len(rows) - streams :].view(len(ready), ahead, hidden.shape[-1])
        return found


def _may_know(wanted: DraftWanted, layers: Sequence[int]) -> bool:
    """Whether the target reports, or may yet report, the state that the last row's streams begin with."""
    last = len(wanted.session.tokens) - 2
    return not wanted.states.known(last, last + 1) or wanted.states.of(last, layers) is not None
