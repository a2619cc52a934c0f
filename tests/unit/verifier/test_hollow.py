"""Models are made without memory for their weights in one thread, while another loads a model of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from services.verifier.loading.hollow import without_weights


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.embedding = nn.Embedding(7, 3)
        self.register_buffer("positions", torch.arange(5) * 2, persistent=False)


class _Filled(_Model):
    """Computes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled", torch.empty(3).fill_(2.0))


def test_weights_take_no_memory_and_buffers_are_computed() -> None:
    made = without_weights(_Model)
    assert all(weight.is_meta for weight in made.parameters())
    assert made.positions.tolist() == [0, 2, 4, 6, 8]


def test_a_buffer_that_is_filled_in_place_is_computed_too() -> None:
    made = without_weights(_Filled)
    assert made.filled.tolist() == [2.0, 2.0, 2.0]
    assert made.positions.tolist() == [0, 2, 4, 6, 8]


def test_other_threads_load_meanwhile() -> None:
    inside, done = threading.Event(), threading.Event()

    def make() -> _Model:
        made = _Model()
        inside.set()
        assert done.wait(60)
        return made

    with ThreadPoolExecutor(1) as other:
        making = other.submit(without_weights, make)
        assert inside.wait(60)
        mine = _Model()
        done.set()
        assert not any(weight.is_meta for weight in mine.parameters())
        assert all(weight.is_meta for weight in making.result().parameters())
