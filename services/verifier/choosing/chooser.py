"""Makes the target's choices on its logits' device, for a whole pass at once, bit for bit as speculation/choose.py.

That file is the law. The batched part only finds the few tokens that can be chosen; among them, the law's own arithmetic and
noise decide on the host. If rounding could make a difference, or a model brings its own processors, the law itself is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from services.model_files.generation_config import ModelProcessors
from services.verifier.choosing.best_of_shards import FoundInParts
from services.verifier.choosing.chosen_logprobs import ChosenLogprobs
from services.verifier.choosing.device_trials import fans_of, tried_on
from services.verifier.choosing.likeliest_ids import SendLikely, send_likeliest, with_chances
from services.verifier.choosing.point_choices import PointChoices
from services.verifier.choosing.prepared_rows import PreparedRows
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.choosing.walks import RequestState, Walk
from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.model.target_port import (
    NOT_CHOSEN,
    Outcome,
    Rows,
    Sampling,
    SingleOutcomes,
    SingleRows,
    ids_of,
)
from services.verifier.model.tree_rows import TreeOutcomes, TreeRows
from speculation.records import maker
from speculation.types import EMPTY_TREE, SamplingParams, TokenLogprobs

_make_outcome = maker(Outcome)
_GREEDY = Sampling(params=SamplingParams(ignore_generation_config=True), prompt_length=0)


class Chooser:
    """Chooses for all requests of a target.

    Args:
        eos_token_ids: the model's end-of-text tokens.
        model: the model's own logits processors, from its generation config.
        kernels: compiled kernels, which choose first where the logits are on a CPU.
        reader: says where logits lie.
        send_likely: sends for the likeliest ids after rows of entries that ask for them; None: they are found in the logits.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int] = frozenset(),
        model: ModelProcessors | None = None,
        kernels: Library | None = None,
        reader: LogitsReader = READER,
        send_likely: SendLikely | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._reader = reader
        self._prepared = PreparedRows(reader)
        self._points = PointChoices(kernels, self._prepared, reader)
        finder = None if kernels is None else LikeliestKernel(kernels)
        self._send_likely = send_likely or partial(send_likeliest, finder=finder, reader=reader)
        self._model = model or ModelProcessors()
        self._requests: dict[str, RequestState] = {}
        # Those of them that are not ``plain``.
        self._choosy: set[str] = set()

    def open(self, request_id: str, sampling: Sampling | None, tokens: Sequence[int] = ()) -> None:
        """Start to choose for a request.

        Args:
            sampling: None for the likeliest token, whatever the model's generation config says.
            tokens: its committed tokens that its passes will not contain.
        """
        request = RequestState(sampling or _GREEDY, self._eos_token_ids, self._model)
        request.advance(0, tokens)
        self._requests[request_id] = request
        (self._choosy.discard if request.plain else self._choosy.add)(request_id)

    def follows(self, request_id: str) -> bool:
        """Whether a request's choices depend on its committed tokens, as with penalties."""
        return self._requests[request_id].follows

    def commit(self, request_id: str, position: int, tokens: Sequence[int]) -> None:
        """Note the tokens committed from ``position`` on."""
        request = self._requests.get(request_id)
        if request is not None and request.follows:
            request.advance(position, tokens)

    def close(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._choosy.discard(request_id)

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self._choosy.clear()

    def outcomes(
        self, batch: Sequence[Rows], logits: torch.Tensor, likeliest: Callable[[], list[int]] | None = None
    ) -> Sequence[Outcome]:
        """The result of a pass for each entry of ``batch``.

        Args:
            logits: [rows read, vocabulary], float32, in the order of ``batch``, on any device.
            likeliest: gives ``LogitsReader.likeliest_of`` the logits, where the pass has found that on a device.

        Raises:
            ValueError: an entry's ``logits`` are neither 0 nor the chain's last row and all nodes.
        """
        if (plain := self._plain_outcomes(batch, logits, likeliest)) is not None:
            return plain
        walks, end = [], 0
        for rows in batch:
            choices = _choices(rows)
            request = self._requests[rows.request_id]
            if request.follows:
                request.advance(rows.context, rows.tokens[: rows.chain])
            first = end + len(rows.scored)
            walks.append(Walk(rows, request, first, [NOT_CHOSEN] * choices))
            end = first + choices
        # On a device it is found behind the pass, before anybody waits for the choices.
        likely = self._send_likely(batch, logits)
        self._walk([walk for walk in walks if walk.rows.logits and walk.rows.tried is None], logits, likeliest)
        tried = [walk for walk in walks if walk.rows.logits and walk.rows.tried is not None]
        if not self._reader.on_host(logits):
            self._try(tried, logits)
        made = ChosenLogprobs(walks, logits)
        found = [self._outcome(walk, logits, top_ids, made) for walk, top_ids in zip(walks, likely(), strict=True)]
        if not any(rows.noise for rows in batch):
            return found
        return [with_chances(outcome, walk, logits) for outcome, walk in zip(found, walks, strict=True)]

    def sought(self, batch: Sequence[Rows]) -> Sought:
        """What says all that ``outcomes`` would, where ranks share the vocabulary."""
        most, draws = 1, []
        for rows in batch:
            request = self._requests[rows.request_id]
            if rows.scored or rows.noise or rows.tried is not None or not (request.plain or request.draw):
                return WHOLE_ROWS
            draws.append(request.draw)
            # One more than may be drawn tells whether equals of the last one are left out.
            most = max(most, rows.top_k, request.draw.top_k + 1 if request.draw else 0)
        return Sought(ids=most, draws=tuple(draws) if any(draws) else ())

    def outcomes_of_parts(self, batch: Sequence[Rows], found: FoundInParts) -> list[Outcome]:
        """As ``outcomes``, by what was ``sought``.

        Raises:
            ValueError: see there.
        """
        walks, truncated_walks, firsts, end = [], [], [own[0] for own in found.ids], 0
        for rows in batch:
            request = self._requests[rows.request_id]
            walk = Walk(rows, request, end, [NOT_CHOSEN] * _choices(rows))
            walks.append(walk)
            end += rows.logits
            if request.draw is not None and request.draw.top_k:
                truncated_walks.append(walk)
            elif rows.logits:
                walk.follow(firsts if request.draw is None else found.drawn)
        if truncated_walks:
            read = [walk.first_row + row for walk in truncated_walks for row in range(walk.rows.logits)]
            self._walk([walk for walk in truncated_walks if walk.rows.logits], found.whole(read), None)
        made = []
        for walk in walks:
            own = found.ids[walk.first_row : walk.first_row + walk.rows.logits]
            tops = tuple([ids[: walk.rows.top_k] for ids in own]) if walk.rows.top_k else ()
            made.append(_make_outcome(choices=tuple(walk.choices), top_ids=tops, error=walk.error))
        return made

    def _plain_outcomes(
        self, batch: Sequence[Rows], logits: torch.Tensor, likeliest: Callable[[], list[int]] | None
    ) -> Sequence[Outcome] | None:
        """As ``outcomes`` where each entry wants the likeliest tokens, likely ids, and no more; None: one wants more."""
        if likeliest is None or self._reader.on_host(logits) or not self._choosy.isdisjoint(ids_of(batch)):
            return None
        if isinstance(batch, SingleRows):
            return None if NOT_CHOSEN in (ids := likeliest()) else SingleOutcomes(ids)
        if not isinstance(batch, TreeRows):
            if any(rows.scored or rows.noise or rows.tried is not None for rows in batch):
                return None
            for rows in batch:
                _choices(rows)
        # They are sent for before anybody waits for the choices.
        likely = self._send_likely(batch, logits)
        ids = likeliest()
        return None if NOT_CHOSEN in ids else TreeOutcomes(batch, ids, likely())

    def _outcome(
        self, walk: Walk, logits: torch.Tensor, top_ids: Sequence[tuple[int, ...]], made: ChosenLogprobs
    ) -> Outcome:
        rows, choices, top = walk.rows, tuple(walk.choices), walk.request.params.logprobs
        scored = made.scored(walk) if rows.scored else ()
        if top is None and rows.tried is None:
            if not (top_ids or scored or walk.error):
                return _make_outcome(choices=choices)
            return _make_outcome(choices=choices, top_ids=top_ids, error=walk.error, scored=scored)

        def logprobs(row: int, token: int) -> TokenLogprobs:
            return made.of(walk, row, token)

        def distribution(row: int) -> NDArray[np.float64]:
            return self._prepared.distribution(walk.point(row), logits)

        return _make_outcome(
            choices=choices,
            top_ids=top_ids,
            logprobs=None if top is None or not choices else logprobs,
            distribution=None if rows.tried is None else distribution,
            tried=walk.tried,
            error=walk.error,
            scored=scored,
        )

    def _walk(self, walks: Sequence[Walk], logits: torch.Tensor, likeliest: Callable[[], list[int]] | None) -> None:
        """Choose after every row that the walk down its tree reaches.

        On a CPU level by level, since work costs most there. On a device all rows at once, since waiting for it costs most.
        """
        if likeliest is not None and not self._reader.on_host(logits) and all(walk.request.unchanged for walk in walks):
            ids = likeliest()
            known = [walk.follow(ids) for walk in walks]
            if all(known):
                return
            for walk in walks:
                walk.choices = [NOT_CHOSEN] * walk.rows.logits
        if not self._reader.on_host(logits):
            points = [walk.point(row) for walk in walks for row in range(walk.rows.logits)]
            taken = iter(self._points.at(logits, points, likeliest))
            chosen = [[next(taken) for _ in range(walk.rows.logits)] for walk in walks]
        frontier = [(at, 0) for at in range(len(walks))]
        while frontier:
            if self._reader.on_host(logits):
                level = self._points.at(logits, [walks[at].point(row) for at, row in frontier])
            else:
                level = [chosen[at][row] for at, row in frontier]
            frontier = [
                (at, child)
                for (at, row), choice in zip(frontier, level, strict=True)
                for child in walks[at].take(row, choice)
            ]

    def _try(self, walks: Sequence[Walk], logits: torch.Tensor) -> None:
        """Note what can be found of the rejection rule without distributions; what fails here is left to the rule."""
        own = [walk for walk in walks if walk.request.pipeline is None]
        points = [walk.point(row) for walk in own for row in range(walk.rows.logits)]
        if not points:
            return
        fans = [fan for walk in own for fan in fans_of(walk.rows.tried or EMPTY_TREE)]
        params, positions = [point.request.params for point in points], [point.position for point in points]
        try:
            found = iter(tried_on(self._prepared.of(logits, points), params, positions, fans, self._reader))
        except Exception:
            for walk in own if len(own) > 1 else ():
                self._try([walk], logits)
            return
        for walk in own:
            walk.tried = tuple(next(found) for _ in range(walk.rows.logits))


def _choices(rows: Rows) -> int:
    """After how many rows a token is chosen.

    Raises:
        ValueError: they are neither none nor the chain's last row and all nodes.
    """
    if rows.logits and rows.logits != 1 + len(rows.parents):
        raise ValueError(f"choices after {rows.logits} rows: after the chain and all {len(rows.parents)} nodes, or none")
    return rows.logits
