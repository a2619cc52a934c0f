"""G10: whether layers with a state give a row of a prompt, and of a tree, the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_check.packings import PackedTree, bushy_tree, tree
from benchmarks.gpu_check.verdicts import GateVerdict, judge_rows
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.recurrence.convolution import ShortConvolution
from services.verifier.recurrence.delta_rule import DeltaRule
from services.verifier.recurrence.device_steps import DeviceSteps
from services.verifier.recurrence.gated_scan import GatedScan
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.recurrence import Recurrence
from services.verifier.recurrence.selective_scan import Mamba2Scan, MambaScan
from services.verifier.recurrence.weighted_mean import WeightedMean


def _none() -> slice:
    return slice(0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateKind:
    """Layers with a state.

    Attributes:
        numbers: that a row is given.
        below: which of them are below 0, such as logarithms of decays.
        parts: which are between 0 and 1.
    """

    recurrence: Recurrence
    numbers: int
    below: slice = field(default_factory=_none)
    parts: slice = field(default_factory=_none)

    def rows(self, count: int) -> torch.Tensor:
        """Random rows, [count, numbers]."""
        made = torch.randn(count, self.numbers, generator=torch.Generator().manual_seed(0))
        made[:, self.below] = -made[:, self.below].abs()
        made[:, self.parts] = made[:, self.parts].sigmoid()
        return made


Kinds = Mapping[str, StateKind]
# Slots: of the text, and of another request.
_TEXT, _OTHER, _SLOTS = 1, 0, 3
# How far the kernels may be from torch on a CPU, which computes in another order.
_TOLERANCE = 2e-3


def kinds_of(device: str, width: int = 2048, size: int = 128) -> Kinds:
    """Qwen3-Next's and Kimi Linear's delta rules, Mamba-2 and Mamba, LFM2's convolution, RecurrentGemma, RWKV.

    Args:
        width: numbers of a row's output, at least twice ``size``.
        size: of keys; heads have as many values, of scans half as many.
    """
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).to(device)

    heads, halves = width // size, 2 * width // size
    delta = DeltaRule(heads=heads, key_heads=heads // 2, key_size=size, value_size=size, decays=1, normalised=True)
    by_key = DeltaRule(heads=heads, key_heads=heads, key_size=size, value_size=size, decays=size, normalised=True)
    mamba2 = Mamba2Scan(
        heads=halves, head_size=size // 2, groups=1, state_size=size, decay=-numbers(halves), skip=numbers(halves),
        step_bias=numbers(halves), softplus=True, least_step=0.0, most_step=float("inf"),
    )  # fmt: skip
    mamba = MambaScan(decay=-numbers(width, 16), skip=numbers(width), step_bias=numbers(width), softplus=True)
    three = ShortConvolution(weight=numbers(width, 3), bias=None, activation=None)
    four = ShortConvolution(weight=numbers(width, 4), bias=numbers(width), activation="silu")
    # Queries and keys have half the heads, or as many; values lie behind them, decays behind those.
    once, twice = 2 * width, 3 * width
    return {
        "gated delta rule": StateKind(
            recurrence=delta, numbers=once + 2 * heads, below=slice(once, once + heads), parts=slice(once + heads, None)
        ),
        "delta rule with decays of keys": StateKind(
            recurrence=by_key, numbers=twice + width + heads, below=slice(twice, twice + width), parts=slice(-heads, None)
        ),
        "Mamba-2": StateKind(recurrence=mamba2, numbers=width + halves + 2 * size),
        "Mamba": StateKind(recurrence=mamba, numbers=2 * width + 2 * 16),
        "convolution of three": StateKind(recurrence=three, numbers=width),
        "convolution of four": StateKind(recurrence=four, numbers=width),
        "gated linear unit": StateKind(recurrence=GatedScan(width=width), numbers=2 * width, parts=slice(0, width)),
        "weighted mean": StateKind(recurrence=WeightedMean(decay=-numbers(width), first=numbers(width)), numbers=2 * width),
    }


class RandomRows:
    """What the rows of a text are given; passes over them in any packing, each of which runs twice.

    Args:
        steps: None: torch computes them.

    Attributes:
        states: of all slots.
        unsteady: passes that gave other bits when they ran again.
    """

    def __init__(self, kind: StateKind, length: int, device: torch.device, steps: DeviceSteps | None) -> None:
        self._given = kind.rows(length).to(device)
        self._recurrence, self._steps = kind.recurrence, steps
        self.length, self.unsteady = length, 0
        self.states = torch.zeros(_SLOTS, *kind.recurrence.state_shape, device=device)

    def run(self, lines: Sequence[Line], shown: Sequence[int], padding: int = 0) -> torch.Tensor:
        """[rows, width] of a pass whose rows, accepted ones first, are given what the text's positions ``shown`` are."""
        device = self._given.device
        rows = self._given[torch.tensor([*shown, *[0] * padding], device=device)]
        before, made = self.states.clone(), []
        for _ in range(2):
            self.states = before.clone()
            order = Order(lines=lines, padding=padding, device=device, steps=self._steps)
            made.append(self._recurrence.compute(order, self.states, rows)[: order.rows - padding])
        self.unsteady += not torch.equal(*made)
        return made[0]

    def chain(self, begin: int, end: int, padding: int = 0) -> torch.Tensor:
        """These positions of the text, behind those before them."""
        return self.run([Line(slot=_TEXT, accepted=0, chain=end - begin, parents=())], range(begin, end), padding)

    def plain(self) -> torch.Tensor:
        """The whole text from its beginning, one row in each pass."""
        self.states[_TEXT] = 0
        return torch.cat([self.chain(at, at + 1) for at in range(self.length)])

    def trees(self, make: Callable[[int], PackedTree], beside: int) -> dict[int, torch.Tensor]:
        """By position, rows of trees whose paths are accepted one after the other, beside ``beside`` rows of another."""
        self.states[_TEXT] = 0
        made: dict[int, torch.Tensor] = {}
        start, accepted, kept = 0, 0, list[int]()
        while start + 5 < self.length:
            packed = make(start)
            own = Line(slot=_TEXT, accepted=accepted, chain=1, parents=packed.parents)
            self.states[_OTHER] = 0
            other = [Line(slot=_OTHER, accepted=0, chain=beside, parents=())] if beside else []
            rows = self.run([*other, own], [*kept, *range(beside), *packed.shown], padding=3)
            path = packed.path[: 1 + len(packed.path) // 2]
            made |= {start + depth: rows[beside + row] for depth, row in enumerate(packed.path)}
            # The path's rows but the first, which was the chain, are stepped over in the next pass.
            kept = [start + depth for depth in range(1, len(path))]
            accepted, start = len(kept), start + len(path)
        return made


def recurrences(
    device: str,
    steps: DeviceSteps,
    length: int = 48,
    depth: int = 6,
    others: int = 5,
    *,
    kinds: Callable[[str], Kinds] = kinds_of,
) -> GateVerdict:
    """G10. ``steps``: the device's; ``depth``, ``others``: of trees."""
    # torch's own functions on a CPU give a row other bits beside others.
    fill_vectors()
    wrong: list[str] = []
    compared = 0
    on_cpu = kinds("cpu")
    for name, kind in kinds(device).items():
        text = RandomRows(kind, length, torch.device(device), steps)
        right = RandomRows(on_cpu[name], length, torch.device("cpu"), None).chain(0, length)
        plain = text.plain()
        # Written so that NaN counts as different.
        off = float((plain.cpu() - right).abs().max() / right.abs().max())
        wrong += [] if off <= _TOLERANCE else [f"{name}: off by {off:.2g} from torch on a CPU"]
        found = {f"chunks of {size}": _chunks(text, size) for size in (5, length)}
        for seed, beside in ((1, 0), (2, 4), (3, length)):
            found[f"trees {seed}"] = text.trees(lambda start: _fitted(start, depth, others, length, seed), beside)  # noqa: B023
        found["bushy trees"] = text.trees(lambda start: bushy_tree(start, min(depth, length - start - 1), length, 24), 0)
        for packing, made in found.items():
            compared += len(made)
            wrong += [f"{name}: {packing}, position {at}" for at, row in made.items() if not torch.equal(row, plain[at])]
        wrong += [f"{name}: {text.unsteady} passes that ran again"] if text.unsteady else []
    return judge_recurrences(wrong, compared)


def _chunks(text: RandomRows, size: int) -> dict[int, torch.Tensor]:
    text.states[_TEXT] = 0
    made = [text.chain(at, min(at + size, text.length), padding=2) for at in range(0, text.length, size)]
    return dict(enumerate(torch.cat(made)))


def _fitted(start: int, depth: int, others: int, length: int, seed: int) -> PackedTree:
    return tree(start, min(depth, length - start - 1), others, length, seed + start)


def judge_recurrences(wrong: Sequence[str], compared: int) -> GateVerdict:
    """The verdict on rows whose bits are not those of plain decoding."""
    return judge_rows(
        wrong,
        compared,
        differ="differ from plain decoding",
        same="in chunks and trees have the bits of plain decoding",
        look="if one kind alone differs, look at its kernel; if all do, at the walk",
        follows="layers with a state are exact",
    )
