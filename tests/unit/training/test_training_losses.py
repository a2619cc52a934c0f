"""Losses against their formulas, written out in numpy; slopes against differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from training.losses import TopTokens, compare, divergence

NAMES = ("hard_ce", "soft_ce", "kl", "tv", "lk", "ce_tv")


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _formula(name: str, p: NDArray[np.float64], q: NDArray[np.float64], overlap: float | None = None) -> float:
    """``overlap``: in place of the row's own, for the weight that has no gradient."""
    tv = 0.5 * np.abs(p - q).sum()
    kl = float((p * (np.log(p) - np.log(q))).sum())
    share = float(np.exp(-3 * ((1 - tv) if overlap is None else overlap)))
    return {
        "hard_ce": -float(np.log(q[p.argmax()])),
        "soft_ce": -float((p * np.log(q)).sum()),
        "kl": kl,
        "tv": float(tv),
        "lk": share * kl + (1 - share) * tv,
        "ce_tv": -0.1 * float((p * np.log(q)).sum()) + 0.9 * float(tv),
    }[name]


def _logits(rows: int, columns: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal((rows, columns)) * 2


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formulas(name: str) -> None:
    p_logits, q_logits = _logits(7, 30, 1), _logits(7, 30, 2)
    value, _, overlap = divergence(
        name, torch.from_numpy(p_logits.copy()).float(), torch.from_numpy(q_logits.copy()).float()
    )
    for row in range(7):
        p, q = _softmax(p_logits[row]), _softmax(q_logits[row])
        assert float(value[row]) == pytest.approx(_formula(name, p, q), rel=1e-4)
        assert float(overlap[row]) == pytest.approx(np.minimum(p, q).sum(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_the_formulas(name: str) -> None:
    p_logits, q_logits = _logits(1, 12, 3)[0], _logits(1, 12, 4)[0]
    p, step = _softmax(p_logits), 1e-6
    _, slope, _ = divergence(name, torch.from_numpy(p_logits)[None].double(), torch.from_numpy(q_logits)[None].double())
    fixed = float(np.minimum(p, _softmax(q_logits)).sum())
    for column in range(12):
        ends = []
        for sign in (1, -1):
            moved = q_logits.copy()
            moved[column] += sign * step
            ends.append(_formula(name, p, _softmax(moved), fixed))
        assert float(slope[0, column]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_equal_distributions_cost_nothing(name: str) -> None:
    logits = torch.from_numpy(_logits(4, 20, 5)).float()
    value, slope, overlap = divergence(name, logits.clone(), logits.clone())
    assert value.abs().max() < 1e-6
    assert slope.abs().max() < 1e-6
    torch.testing.assert_close(overlap, torch.ones(4))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_what_the_output_layer_reads(name: str) -> None:
    """More rows than one chunk; the gradient is that of autograd through the same products."""
    random = torch.Generator().manual_seed(6)
    rows = torch.randn(40, 16, generator=random)
    states = torch.randn(530, 16, generator=random)
    hidden = torch.randn(530, 16, generator=random, requires_grad=True)
    weights = torch.rand(530, generator=random)
    (compare(name, hidden, states, rows).value * weights).sum().backward()
    p, log_q = (states @ rows.T).softmax(-1), (hidden @ rows.T).log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    cross = -(p * log_q).sum(-1)
    kl, share = cross + (p * p.log()).sum(-1), torch.exp(-3 * overlap.detach())
    plain = {
        "hard_ce": -log_q.gather(-1, p.argmax(-1, keepdim=True))[:, 0],
        "soft_ce": cross,
        "kl": kl,
        "tv": 1 - overlap,
        "lk": share * kl + (1 - share) * (1 - overlap),
        "ce_tv": 0.1 * cross + 0.9 * (1 - overlap),
    }[name]
    (expected,) = torch.autograd.grad((plain * weights).sum(), hidden)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_certain_and_impossible_tokens_give_numbers(name: str) -> None:
    """Distributions that do not overlap at all in float32: values and slopes stay finite."""
    p_logits, q_logits = torch.zeros(1, 8), torch.zeros(1, 8)
    p_logits[0, 0], q_logits[0, 1] = 200.0, 200.0
    value, slope, overlap = divergence(name, p_logits, q_logits)
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()
    assert float(overlap[0]) == 0.0


@pytest.mark.parametrize("frozen", [16, 0])
def test_output_rows_of_the_drafter_are_trained(frozen: int) -> None:
    """They read the last numbers of what the drafter gives, and the target's rows those before; with HASS's top-k loss."""
    random = torch.Generator().manual_seed(7)
    rows, states = torch.randn(40, 16, generator=random), torch.randn(530, 16, generator=random)
    own = torch.randn(40, 6, generator=random, requires_grad=True)
    hidden = torch.randn(530, frozen + 6, generator=random, requires_grad=True)
    weights = torch.rand(530, generator=random)
    found = compare("kl", hidden, states, rows, own=own, top=TopTokens(3, 0.5))
    (found.value * weights).sum().backward()
    p = (states @ rows.T).softmax(-1)
    log_q = (hidden[:, :frozen] @ rows[:, :frozen].T + hidden[:, frozen:] @ own.T).log_softmax(-1)
    likely = p >= p.topk(3, dim=-1).values[:, -1:]
    plain = (p * (p.log() - log_q)).sum(-1) - 0.5 * (likely * p * log_q).sum(-1)
    torch.testing.assert_close(found.value, plain, rtol=1e-4, atol=1e-5)
    of_hidden, of_own = torch.autograd.grad((plain * weights).sum(), (hidden, own))
    assert hidden.grad is not None and own.grad is not None
    torch.testing.assert_close(hidden.grad, of_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.grad, of_own, rtol=1e-3, atol=1e-3)


def test_no_rows_give_nothing() -> None:
    hidden = torch.zeros(0, 16, requires_grad=True)
    found = compare("lk", hidden, torch.zeros(0, 16), torch.zeros(5, 16))
    assert len(found.value) == len(found.overlap) == 0
    found.value.sum().backward()
