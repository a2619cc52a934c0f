"""The target's choices, where its logits are: for all requests of a pass at once, equal to speculation/choose.py bit for bit.

What is batched here only finds out which few tokens can be chosen. Which of them is, the law's own arithmetic and noise decide,
on the host; and where rounding could make a difference, or a model's own processors are asked for, the law is asked itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVarTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from services.generation_config import ModelProcessors
from services.verifier.choosing.candidates import Candidates, likeliest, narrow, truncates
from services.verifier.choosing.noise import likely_winners
from services.verifier.choosing.penalties import Changes, Penalties
from services.verifier.choosing.processors import build_pipeline, build_warpers
from speculation.acceptance import stop_token_ids
from speculation.choose import choose, log_probabilities
from speculation.philox import NoiseStream, gumbels
from speculation.ports import NOT_CHOSEN, Outcome, Rows, Sampling
from speculation.types import SamplingParams, TokenLogprobs

_GREEDY = Sampling(params=SamplingParams(ignore_generation_config=True), prompt_length=0)
_Choice = int | Exception
_Arguments = TypeVarTuple("_Arguments")


class _Request:
    """What is known of one request between passes."""

    def __init__(self, sampling: Sampling, eos_token_ids: frozenset[int], model: ModelProcessors) -> None:
        self.params = params = sampling.params
        stop_ids = stop_token_ids(params, eos_token_ids)
        self.penalties = Penalties(params, sampling.prompt_length, stop_ids)
        own = model.shown and not params.ignore_generation_config
        self.pipeline = (
            build_pipeline(params, prompt_length=sampling.prompt_length, stop_ids=stop_ids, model=model) if own else None
        )
        self.warpers = build_warpers(params)
        # Kept where processors walk it.
        self.history: list[int] = []
        self._known = 0

    def advance(self, position: int, tokens: Sequence[int]) -> None:
        """Take note of committed tokens, from ``position`` on; those that are known already are passed over."""
        new = tokens[self._known - position :] if position < self._known else tokens
        if not new:
            return
        if self.penalties.counts is not None:
            self.penalties.counts.add(self._known, new)
        if self.pipeline is not None:
            self.history += new
        self._known += len(new)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A row of the pass's logits after which a token is to be chosen: the one at ``position``, after ``path``."""

    request: _Request
    row: int
    position: int
    path: tuple[int, ...]


@dataclass(slots=True)
class _Walk:
    """One request's rows, while its tree is walked; row 0 is the pending token's, row i + 1 node i's."""

    rows: Rows
    request: _Request
    first_row: int
    choices: list[int] = field(default_factory=list)
    error: Exception | None = None

    def cell(self, row: int) -> _Cell:
        """What has to be known to choose after row ``row``."""
        tokens, node, path = self.rows.tokens[self.rows.chain :], row - 1, []
        while node >= 0:
            path.append(tokens[node])
            node = self.rows.parents[node]
        position = self.rows.context + self.rows.chain + len(path)
        return _Cell(self.request, self.first_row + row, position, tuple(reversed(path)))

    def take(self, row: int, choice: _Choice) -> list[int]:
        """Note a choice; gives the rows of the children that hold it."""
        if isinstance(choice, Exception):
            self.error = self.error or choice
            return []
        self.choices[row] = choice
        tokens, parents = self.rows.tokens[self.rows.chain :], self.rows.parents
        return [node + 1 for node, parent in enumerate(parents) if parent == row - 1 and tokens[node] == choice]


class Chooser:
    """Chooses for all requests of a target.

    Args:
        eos_token_ids: the model's end-of-text tokens.
        model: what the model's generation config does to logits.
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset(), model: ModelProcessors | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._model = model or ModelProcessors()
        self._requests: dict[str, _Request] = {}

    def open(self, session_id: str, sampling: Sampling | None, tokens: Sequence[int] = ()) -> None:
        """From now on choose for a request.

        Args:
            sampling: None for the likeliest token, whatever the model's generation config says.
            tokens: what is committed of it, as far as its passes will not show it.
        """
        request = _Request(sampling or _GREEDY, self._eos_token_ids, self._model)
        request.advance(0, tokens)
        self._requests[session_id] = request

    def commit(self, session_id: str, position: int, tokens: Sequence[int]) -> None:
        """Take note of tokens that have been kept, from ``position`` on."""
        if (request := self._requests.get(session_id)) is not None:
            request.advance(position, tokens)

    def close(self, session_id: str) -> None:
        """Forget a request."""
        self._requests.pop(session_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def outcomes(self, batch: Sequence[Rows], logits: torch.Tensor) -> list[Outcome]:
        """What a pass brings for each entry of ``batch``.

        Args:
            logits: [rows chosen after, vocabulary], float32, one entry's rows after the other's, on any device.
        """
        walks, end = [], 0
        for rows in batch:
            if rows.logits not in (0, 1 + len(rows.parents)):
                raise ValueError(f"choices after {rows.logits} rows: after the chain and all {len(rows.parents)} nodes, or none")
            request = self._requests[rows.session_id]
            request.advance(rows.context, rows.tokens[: rows.chain])
            walks.append(_Walk(rows, request, end, [NOT_CHOSEN] * rows.logits))
            end += rows.logits
        self._walk([walk for walk in walks if walk.rows.logits and not walk.rows.distributions], logits)
        top_ids = self._likeliest(walks, logits)
        return [self._outcome(walk, logits, tops) for walk, tops in zip(walks, top_ids, strict=True)]

    def _outcome(self, walk: _Walk, logits: torch.Tensor, top_ids: tuple[tuple[int, ...], ...]) -> Outcome:
        top = walk.request.params.logprobs

        def logprobs(row: int, token: int) -> TokenLogprobs:
            return log_probabilities(logits[walk.first_row + row], token, top or 0)

        def distribution(row: int) -> NDArray[np.float64]:
            return self._distribution(walk.cell(row), logits)

        return Outcome(
            choices=tuple(walk.choices),
            top_ids=top_ids,
            logprobs=None if top is None or not walk.choices else logprobs,
            distribution=distribution if walk.rows.distributions else None,
            error=walk.error,
        )

    @staticmethod
    def _likeliest(walks: Sequence[_Walk], logits: torch.Tensor) -> list[tuple[tuple[int, ...], ...]]:
        """The likeliest ids after each walk's rows, for those that ask; at once for all that ask for as many."""
        found: list[tuple[tuple[int, ...], ...]] = [()] * len(walks)
        for k in {walk.rows.top_k for walk in walks if walk.rows.top_k and walk.rows.logits}:
            asking = [at for at, walk in enumerate(walks) if walk.rows.top_k == k]
            rows = [walks[at].first_row + row for at in asking for row in range(walks[at].rows.logits)]
            ids = iter(likeliest(logits if len(rows) == len(logits) else logits[rows], k).tolist())
            for at in asking:
                found[at] = tuple(tuple(next(ids)) for _ in range(walks[at].rows.logits))
        return found

    def _walk(self, walks: Sequence[_Walk], logits: torch.Tensor) -> None:
        """Choose after every row that a walk down its tree can come to.

        On a CPU level by level: work is what costs. On a device all rows at once: what costs is waiting for it.
        """
        if logits.device.type != "cpu":
            cells = [walk.cell(row) for walk in walks for row in range(walk.rows.logits)]
            taken = iter(self.choose(logits, cells))
            chosen = [[next(taken) for _ in range(walk.rows.logits)] for walk in walks]
        frontier = [(at, 0) for at in range(len(walks))]
        while frontier:
            if logits.device.type == "cpu":
                level = self.choose(logits, [walks[at].cell(row) for at, row in frontier])
            else:
                level = [chosen[at][row] for at, row in frontier]
            frontier = [
                (at, child)
                for (at, row), choice in zip(frontier, level, strict=True)
                for child in walks[at].take(row, choice)
            ]

    def choose(self, logits: torch.Tensor, cells: Sequence[_Cell]) -> list[_Choice]:
        """The choice at each cell, or why there is none: one request's trouble is not another's."""
        try:
            return self._choose(logits, cells)
        except Exception as error:
            if len(cells) == 1:
                return [error]
            return [choice for cell in cells for choice in self.choose(logits, [cell])]

    def _choose(self, logits: torch.Tensor, cells: Sequence[_Cell]) -> list[_Choice]:
        choices: list[_Choice] = [NOT_CHOSEN] * len(cells)
        greedy, sampled = [], []
        for at, cell in enumerate(cells):
            if cell.request.pipeline is not None:
                choices[at] = _by_law(cell, self._processed, cell, logits)
            else:
                (greedy if cell.request.params.temperature == 0 else sampled).append(at)
        for some, choosing in ((greedy, _argmax), (sampled, _sample)):
            if some:
                own = [cells[at] for at in some]
                for at, choice in zip(some, choosing(_adjusted(logits, own), own), strict=True):
                    choices[at] = choice
        return choices

    def _processed(self, cell: _Cell, logits: torch.Tensor) -> torch.Tensor:
        """[vocabulary], on the CPU: the logits as all processors of the request leave them."""
        request = cell.request
        if request.pipeline is not None:
            return request.pipeline(logits[cell.row].cpu(), [*request.history, *cell.path])
        return _warped(_adjusted(logits, [cell])[0], request)

    def _distribution(self, cell: _Cell, logits: torch.Tensor) -> NDArray[np.float64]:
        row, params = self._processed(cell, logits), cell.request.params
        if params.temperature == 0:
            p = np.zeros(len(row))
            p[choose(row, params, params.seed, cell.position)] = 1.0
            return p
        return np.asarray(torch.softmax(row.double(), dim=-1).numpy())


def _adjusted(logits: torch.Tensor, cells: Sequence[_Cell]) -> torch.Tensor:
    """[cells, vocabulary]: biases, penalties and barred tokens done; not to be modified."""
    rows = [cell.row for cell in cells]
    touched = [at for at, cell in enumerate(cells) if cell.request.penalties.needed(cell.position)]
    if len(cells) == 1:
        found = logits[rows[0] : rows[0] + 1]
        found = found.clone() if touched else found
    else:
        found = logits[rows] if touched or rows != list(range(len(logits))) else logits
    if touched:
        changes = Changes([], [], [], [])
        for at in touched:
            cell = cells[at]
            cell.request.penalties.changes(at, logits.shape[1], cell.path, cell.position, changes)
        changes.apply(found)
    return found


def _warped(row: torch.Tensor, request: _Request) -> torch.Tensor:
    """[vocabulary], on the CPU: after temperature and truncation, by transformers' processors."""
    return row.cpu() if request.warpers is None else request.warpers(row.cpu(), ())


def _by_law(cell: _Cell, process: Callable[[Unpack[_Arguments]], torch.Tensor], *arguments: Unpack[_Arguments]) -> _Choice:
    """What speculation/choose.py says of the processed row."""
    params = cell.request.params
    try:
        return choose(process(*arguments), params, params.seed, cell.position)
    except Exception as error:
        return error


def _argmax(logits: torch.Tensor, cells: Sequence[_Cell]) -> list[_Choice]:
    """The greatest of each row, the first of equals."""
    if logits.device.type == "cpu":
        return [_by_law(cell, row.cpu) for row, cell in zip(logits, cells, strict=True)]
    tops = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == tops, ids, len(ids)).amin(-1)
    finite = torch.isfinite(tops[:, 0])
    return [
        token if usable else _by_law(cell, row.cpu)
        for token, usable, row, cell in zip(first.tolist(), finite.tolist(), logits, cells, strict=True)
    ]


def _sample(logits: torch.Tensor, cells: Sequence[_Cell]) -> list[_Choice]:
    """Gumbel-max over the few tokens of each row that can win."""
    temperatures = torch.tensor([cell.request.params.temperature for cell in cells], device=logits.device)
    scaled = logits / temperatures[:, None] if any(cell.request.params.temperature != 1 for cell in cells) else logits
    params = [cell.request.params for cell in cells]
    candidates = _candidates(scaled, cells, params)
    choices: list[_Choice] = [
        NOT_CHOSEN if found is not None else _by_law(cell, _warped, row, cell.request)
        for found, row, cell in zip(candidates, logits, cells, strict=True)
    ]
    open_cells = [(at, found) for at, found in enumerate(candidates) if found is not None]
    if open_cells:
        noisy = _noisy([(cells[at], found) for at, found in open_cells])
        for (at, found), values in zip(open_cells, noisy, strict=True):
            choices[at] = int(found.ids[int(values.argmax())])
    return choices


def _candidates(
    scaled: torch.Tensor, cells: Sequence[_Cell], params: Sequence[SamplingParams]
) -> list[Candidates | None]:
    """Of each row the tokens that can win; None where the law is to be asked."""
    found: list[Candidates | None] = [None] * len(cells)
    cut = [at for at, own in enumerate(params) if truncates(own, scaled.shape[1])]
    whole = [at for at in range(len(cells)) if at not in set(cut)]
    for at, own in zip(cut, narrow(_some(scaled, cut), [params[at] for at in cut]) if cut else (), strict=True):
        found[at] = own
    # On a CPU the law is as fast as a search for those that can win.
    if whole and scaled.device.type != "cpu":
        seeds, positions = [params[at].seed for at in whole], [cells[at].position for at in whole]
        for at, own in zip(whole, likely_winners(_some(scaled, whole), seeds, positions), strict=True):
            found[at] = own
    return found


def _some(rows: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    return rows if len(wanted) == len(rows) else rows[wanted]


def _noisy(open_cells: Sequence[tuple[_Cell, Candidates]]) -> list[NDArray[np.float64]]:
    """The candidates' logits with the law's noise, which is made for all of them at once."""
    sizes = [len(found.ids) for _, found in open_cells]
    seeds = np.repeat(np.array([cell.request.params.seed for cell, _ in open_cells], dtype=np.uint64), sizes)
    positions = np.repeat(np.array([cell.position for cell, _ in open_cells], dtype=np.int64), sizes)
    ids = np.concatenate([found.ids for _, found in open_cells])
    weights = np.concatenate([found.weights for _, found in open_cells])
    noisy = weights + gumbels(seeds, NoiseStream.CHOICE, positions, ids)
    return np.split(noisy, np.cumsum(sizes)[:-1])
