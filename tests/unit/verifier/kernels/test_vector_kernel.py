"""States of some numbers for each channel: the compiled kernels compute what torch does, and a row's bits hang on its path alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from services.verifier.kernels.native.library import Library, library
from services.verifier.kernels.native.vector_kernel import fits, fits_convolution
from services.verifier.recurrence.convolution import ShortConvolution
from services.verifier.recurrence.gated_scan import GatedScan
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.recurrence import Recurrence
from services.verifier.recurrence.walks import FROM_STATE
from services.verifier.recurrence.weighted_mean import WeightedMean
from tests.kernels.kernels_here import all_here

# A whole part of a thread's channels, and a piece of one that is no whole vectors of two.
WIDTH = 256 + 48
SLOTS = 3
PARENTS = (FROM_STATE, 0, 0, FROM_STATE, 2, 1, 4)
# Chains as long as a window, longer, and shorter; accepted rows; padding.
LINES = [
    Line(slot=2, accepted=3, chain=5, parents=PARENTS),
    Line(slot=0, accepted=0, chain=2, parents=()),
    Line(slot=1, accepted=0, chain=1, parents=(FROM_STATE, FROM_STATE)),
]
PADDING = 1


def convolution(taps: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> ShortConvolution:
    torch.manual_seed(taps)
    return ShortConvolution(
        weight=torch.randn(WIDTH, taps).to(dtype), bias=torch.randn(WIDTH).to(dtype) if bias else None, activation=None
    )


def mean() -> WeightedMean:
    torch.manual_seed(1)
    return WeightedMean(decay=-torch.rand(WIDTH), first=torch.randn(WIDTH))


EXACT: dict[str, Callable[[], Recurrence]] = {
    "one tap": lambda: convolution(1),
    "two taps": lambda: convolution(2),
    "LFM2's": lambda: convolution(3),
    "a delta net's": lambda: convolution(4, bias=True),
    "of short numbers": lambda: convolution(4, bias=True, dtype=torch.bfloat16),
    "many taps": lambda: convolution(8, bias=True),
    "gated": lambda: GatedScan(width=WIDTH),
}
ALL = {**EXACT, "mean": mean}


@pytest.fixture
def kernels() -> Library:
    found = library()
    if found is None:
        pytest.skip("our kernels cannot be compiled here")
    return found


def rows_of(recurrence: Recurrence, count: int) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(count, WIDTH if isinstance(recurrence, ShortConvolution) else 2 * WIDTH)


def states_of(recurrence: Recurrence) -> torch.Tensor:
    torch.manual_seed(3)
    states = torch.randn(SLOTS, *recurrence.state_shape)
    if isinstance(recurrence, WeightedMean):
        # One has seen no row; weights are not below 1.
        states[:, 1] = states[:, 1].abs() + 1
        states[0] = 0
    return states


def order(lines: Sequence[Line], kernels: Library | None, padding: int = 0) -> Order:
    return Order(lines=lines, padding=padding, device=torch.device("cpu"), library=kernels)


def computed(recurrence: Recurrence, kernels: Library | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows of the pass get, without padding, and the states afterwards."""
    ordered, states = order(LINES, kernels, PADDING), states_of(recurrence)
    made = recurrence.compute(ordered, states, rows_of(recurrence, ordered.accepted + ordered.rows))
    return made[:-PADDING], states


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernels_compute_what_torch_does(
    kernels: Library, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.kernels.native.vector_kernel._ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    recurrence = ALL[kind]()
    results = zip(computed(recurrence, kernels), computed(recurrence, None), strict=True)
    if kind in EXACT:
        assert all(torch.equal(own, right) for own, right in results)
    else:
        for own, right in results:
            torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-5)


def test_rows_may_lie_apart_or_the_other_way_round(kernels: Library) -> None:
    filters = convolution(4)
    ordered = order([Line(slot=1, accepted=0, chain=6, parents=())], kernels)
    rows = rows_of(filters, 6)
    right = filters.compute(ordered, states_of(filters), rows)
    apart = torch.cat([rows, rows], dim=1)[:, WIDTH:]
    for given in (apart, rows.T.contiguous().T):
        assert torch.equal(filters.compute(ordered, states_of(filters), given), right)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_has_the_same_bits_alone_and_in_a_tree(kernels: Library, kind: str, compiled: bool) -> None:
    by, recurrence = kernels if compiled else None, ALL[kind]()
    rows = rows_of(recurrence, 4 + len(PARENTS))
    states, begun = states_of(recurrence), states_of(recurrence)
    tree = recurrence.compute(order([Line(slot=1, accepted=0, chain=4, parents=PARENTS)], by), states, rows)
    # The path 0, 2, 4, 6 of the tree, after the chain.
    for at in (0, 1, 2, 3, 4, 6, 8, 10):
        alone = recurrence.compute(order([Line(slot=1, accepted=0, chain=1, parents=())], by), begun, rows[at : at + 1])
        assert torch.equal(alone[0], tree[at])
        if at == 3:
            assert torch.equal(begun, states), "a tree's nodes change no state"


@pytest.mark.parametrize("kind", ALL)
def test_all_instruction_sets_compute_the_same_bits(kernels: Library, kind: str) -> None:
    right, states = computed(ALL[kind](), kernels)
    for other in all_here():
        made, own = computed(ALL[kind](), other)
        assert torch.equal(made, right)
        assert torch.equal(own, states)


def test_numbers_that_are_none_stay_none(kernels: Library) -> None:
    """In the channels that have them, and in no other."""
    recurrence = mean()
    rows = rows_of(recurrence, 3)
    rows[1, 7] = torch.nan
    rows[1, 8] = torch.inf
    line = [Line(slot=1, accepted=0, chain=3, parents=())]
    for by in (kernels, None):
        none = recurrence.compute(order(line, by), states_of(recurrence), rows).isnan()
        assert none[1:, 7:9].all()
        assert none.sum() == 4


def test_other_sizes_are_left_to_torch() -> None:
    assert not fits(torch.empty(1, 24))
    assert not fits_convolution(torch.empty(1, 3, 24))
    assert not fits_convolution(torch.empty(1, 8, 32))
