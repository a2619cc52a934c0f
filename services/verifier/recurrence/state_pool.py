"""The states of all live requests, beside the KV cache.

A request's state stands at the end of its last chain, since chains are always kept. The nodes of a tree step from it without
changing it; what they were given is noted. Those that are accepted become the first rows of the request's next pass: the
state steps over them again, in the same order, so it gets the same bits as if they had been decoded alone.

Copies of states are kept for requests that begin with the same tokens. Which ones is decided in ``kv_cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import Library
from services.verifier.loading.memory import kept_states, state_slots
from services.verifier.model.target_port import Rows
from services.verifier.model.to_device import to_device
from services.verifier.recurrence.cuts import cut
from services.verifier.recurrence.device_steps import DeviceSteps
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.recurrence import Recurrence
from speculation.errors import ConfigurationError, Internal

Shape = tuple[int, ...]
# Finds what steps states on a device, which a CPU does not need; or says why nothing does.
FindSteps = Callable[[torch.device], tuple[DeviceSteps | None, str]]


@dataclass(kw_only=True, slots=True, eq=False)
class _Nodes:
    """The nodes of a pass.

    Attributes:
        rows: [nodes], indices into the pass.
        given: of each layer, [nodes, numbers].
    """

    rows: torch.Tensor
    given: list[torch.Tensor] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Held:
    """What is held of a request.

    Attributes:
        length: number of tokens that its state has seen.
        nodes: of its last pass; its own are ``count``, from number ``first`` on.
        context: of its last pass; ``chain``: the length of its chain.
        accepted: numbers of the nodes that follow the state.
        loaded: slot of the kept state that it begins from.
        saved: after how many tokens its state is kept in its next pass, and in which slots.
    """

    slot: int
    length: int = 0
    nodes: _Nodes | None = None
    first: int = 0
    count: int = 0
    context: int = 0
    chain: int = 0
    accepted: list[int] = field(default_factory=list)
    loaded: int | None = None
    saved: list[tuple[int, int]] = field(default_factory=list)


class StatePool:
    """States of at most ``slots`` requests, and at most ``kept`` copies, which are numbered from 0 on.

    Args:
        shapes: of one request's state in each layer, in the order in which the model calls the layers.
        library: compiled kernels that may compute them.
        steps: what computes them on another device than a CPU; an attribute, too.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        *,
        slots: int,
        kept: int = 0,
        device: torch.device,
        library: Library | None,
        steps: DeviceSteps | None = None,
    ) -> None:
        self.device = device
        self._library, self.steps = library, steps
        self.shapes = tuple(shapes)
        # The copies lie behind the requests' states.
        self.states = [torch.zeros(slots + kept, *shape, device=device, dtype=torch.float32) for shape in shapes]
        self._first_kept = slots
        self._free = list(range(slots))
        self._held: dict[str, _Held] = {}
        # All rows of captured passes.
        self._noted = _Nodes(rows=torch.empty(0, dtype=torch.float32))

    def assign(self, owner: str) -> None:
        """Give ``owner`` a slot, if it has none yet."""
        if owner not in self._held:
            self._held[owner] = _Held(slot=self._free.pop())

    def load(self, owner: str, length: int, kept: int) -> None:
        """Let ``owner``, new here, begin from a kept state, which has seen its first ``length`` tokens."""
        held = self._held[owner]
        held.length, held.loaded = length, self._first_kept + kept

    def save(self, owner: str, length: int, kept: int) -> None:
        """Keep a copy of the state of ``owner`` after ``length`` tokens, which its next pass brings it to, or beyond."""
        self._held[owner].saved.append((length, self._first_kept + kept))

    def forget(self, owner: str) -> None:
        """Take the slot from ``owner``, which may have none."""
        held = self._held.pop(owner, None)
        if held is not None:
            self._free.append(held.slot)

    def check(self, layer: int, recurrence: Recurrence) -> None:
        """Check that a call is the one that was recorded.

        Raises:
            NotImplementedError: it is not.
        """
        if layer == len(self.shapes) or self.shapes[layer] != recurrence.state_shape:
            raise NotImplementedError(f"its layers with a state change from pass to pass: {recurrence.state_shape}")

    def clear(self) -> None:
        """Take all slots from all owners."""
        for owner in list(self._held):
            self.forget(owner)

    def keep(self, owner: str, context: int, rows: Sequence[int]) -> None:
        """As ``Target.keep``. Rows that were never computed count as computed: passes are timed so."""
        held = self._held[owner]
        of_pass = held.nodes is not None and held.context == context
        if of_pass and list(rows[: held.chain]) == list(range(held.chain)):
            held.accepted = [held.first + row - held.chain for row in rows[held.chain :]]
        else:
            held.length, held.nodes, held.accepted = context + len(rows), None, []

    def begin(self, batch: Sequence[Rows], padding: int) -> RunningSteps:
        """Start a pass over ``batch``, followed by ``padding`` rows that belong to no request.

        Raises:
            Internal: a request's state does not stand where its rows begin.
        """
        nodes = _Nodes(rows=torch.empty(0, dtype=torch.float32))
        lines, early, of_nodes = self._enter(batch, nodes)
        nodes.rows = to_device(of_nodes, self.device, torch.int64)
        taken = [(source, to_device(numbers, self.device)) for source, numbers in early]
        return RunningSteps(self, self._parts(lines, padding), nodes, taken)

    def begin_captured(self, batch: Sequence[Rows]) -> tuple[list[Line], list[int]]:
        """Start a pass that ``fits_captured``, all rows of which are noted in one place for all such passes.

        Returns:
            The requests' lines, and the accepted rows, by where they are noted.
        """
        own = {rows.request_id for rows in batch}
        for owner, held in self._held.items():
            if held.nodes is self._noted and owner not in own:
                # Where its nodes are noted, others are now.
                place = slice(held.first, held.first + held.count)
                held.nodes = _Nodes(
                    rows=torch.empty(0, dtype=torch.float32), given=[given[place].clone() for given in self._noted.given]
                )
                held.accepted = [node - held.first for node in held.accepted]
                held.first = 0
        lines, early, _ = self._enter(batch, self._noted)
        return lines, [node for _, nodes in early for node in nodes]

    def fits_captured(self, batch: Sequence[Rows], accepted: int) -> bool:
        """Whether the accepted rows of these requests are at most so many, and noted where captured passes find them."""
        held = [one for one in (self._held[rows.request_id] for rows in batch if rows.context) if one.accepted]
        return all(one.nodes is self._noted for one in held) and sum(len(one.accepted) for one in held) <= accepted

    def ends(self, batch: Sequence[Rows]) -> int:
        """At how many rows of a pass states are put somewhere."""
        return sum(1 + len(self._held[rows.request_id].saved) for rows in batch)

    def noted(self, layer: int, rows: torch.Tensor, most: int) -> torch.Tensor:
        """Where captured passes, of at most so many rows, note theirs, which are like ``rows``."""
        if layer == len(self._noted.given):
            self._noted.given.append(rows.new_zeros(most, rows.shape[1]))
        return self._noted.given[layer]

    def _enter(self, batch: Sequence[Rows], nodes: _Nodes) -> tuple[list[Line], list[tuple[_Nodes, list[int]]], list[int]]:
        """Let requests enter a pass, whose nodes are ``nodes``; returns their lines, accepted rows, and the nodes' rows."""
        self._load_all()
        lines: list[Line] = []
        early: list[tuple[_Nodes, list[int]]] = []
        of_nodes: list[int] = []
        begin = 0
        for rows in batch:
            held = self._held[rows.request_id]
            if rows.context == 0:
                self._reset(held)
            elif rows.context != held.length + len(held.accepted):
                at = held.length + len(held.accepted)
                raise Internal(f"the state of {rows.request_id} is of {at} tokens, and its rows begin after {rows.context}")
            if held.nodes is not None and held.accepted:
                early.append((held.nodes, held.accepted))
            begun = rows.context - len(held.accepted)
            saved = [(length - begun, slot) for length, slot in held.saved]
            lines.append(
                Line(slot=held.slot, accepted=len(held.accepted), chain=rows.chain, parents=rows.parents, saved=saved)
            )
            held.saved = []
            held.context, held.chain, held.length = rows.context, rows.chain, rows.context + rows.chain
            held.first = begin + rows.chain if nodes is self._noted else len(of_nodes)
            held.nodes, held.count, held.accepted = nodes, len(rows.parents), []
            of_nodes += range(begin + rows.chain, begin + len(rows.tokens))
            begin += len(rows.tokens)
        return lines, early, of_nodes

    def _parts(self, lines: Sequence[Line], padding: int) -> list[tuple[Order, torch.Tensor | None]]:
        """The parts of a pass, with the numbers of their rows; one that is the whole pass needs none."""
        if self.steps is not None:
            # They keep states in mid-line.
            return [(Order(lines=lines, padding=padding, device=self.device, steps=self.steps), None)]
        parts = cut(lines, padding)
        return [
            (
                Order(lines=part.lines, padding=part.padding, device=self.device, library=self._library),
                torch.tensor(part.rows, device=self.device) if len(parts) > 1 else None,
            )
            for part in parts
        ]

    def _load_all(self) -> None:
        """Before anything is kept in this pass, since a copy that was to be loaded may have lost its slot to it."""
        for held in self._held.values():
            if held.loaded is not None:
                for states in self.states:
                    states[held.slot] = states[held.loaded]
                held.loaded = None

    def _reset(self, held: _Held) -> None:
        held.accepted = []
        for states in self.states:
            states[held.slot] = 0


class RunningSteps:
    """Implements ``Steps`` for a pass that runs.

    Args:
        parts: of the pass, as of ``cut``; with the numbers of their rows, [rows], where there are several.
        nodes: gets what the pass's nodes are given.
        early: the accepted rows, as numbers of nodes of earlier passes, in the order of the requests.
    """

    def __init__(
        self,
        pool: StatePool,
        parts: Sequence[tuple[Order, torch.Tensor | None]],
        nodes: _Nodes,
        early: Sequence[tuple[_Nodes, torch.Tensor]],
    ) -> None:
        self._pool = pool
        self._parts = parts
        # Where the rows of the pass lie among those that its parts make, one part after the other.
        own = [rows[order.accepted :] for order, rows in parts if rows is not None]
        self._places = torch.cat(own).argsort() if own else None
        self._nodes = nodes
        self._early = early

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """As ``Steps.step``.

        Raises:
            NotImplementedError: the model does not call its layers as it did when it was recorded.
        """
        layer, pool = len(self._nodes.given), self._pool
        pool.check(layer, recurrence)
        rows = given.float()
        self._nodes.given.append(rows[self._nodes.rows])
        early = [nodes.given[layer][numbers] for nodes, numbers in self._early]
        made = self._computed(recurrence, pool.states[layer], torch.cat([*early, rows]) if early else rows)
        return made.to(given.dtype)

    def _computed(self, recurrence: Recurrence, states: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """As ``Recurrence.compute``, part by part; states are kept where lines end."""
        made = []
        for order, rows in self._parts:
            made.append(recurrence.compute(order, states, given if rows is None else given[rows]))
            for line in order.lines if order.steps is None else ():
                for _, slot in line.saved:
                    states[slot] = states[line.slot]
        return made[0] if self._places is None else torch.cat(made)[self._places]


def states_of(
    shapes: Sequence[Shape], config: TargetConfig, library: Library | None, find: FindSteps = lambda _: (None, "")
) -> StatePool | None:
    """States in each layer that has some; None: no layer does.

    Args:
        library: compiled kernels that may compute them.
        find: finds what computes them on another device than a CPU, or says why nothing does.

    Raises:
        ConfigurationError: the device does not compute such layers; says why.
    """
    if not shapes:
        return None
    steps, reason = find(torch.device(config.device))
    if steps is not None:
        reason = next(filter(None, map(steps.refusal, shapes)), "")
    if reason:
        raise ConfigurationError(
            f"the model has layers with a state, which this device does not compute: {reason}",
            field="verifier.device",
            value=config.device,
            allowed="cpu",
        )
    return StatePool(
        shapes,
        slots=state_slots(config),
        kept=kept_states(config),
        device=torch.device(config.device),
        library=library,
        steps=steps,
    )
