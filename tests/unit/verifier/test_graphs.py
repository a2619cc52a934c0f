"""Which passes are captured at start: all that the settings allow, or it is said which setting to lower. Without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.verifier.attention.calls import Call
from services.verifier.attention.fixed import Buckets, Largest, largest_pass, row_steps, rows_up, steps
from services.verifier.attention.static import StaticBuckets
from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.graphs import Graphs, Keep, Made
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

CPU = torch.device("cpu")
LARGEST = Largest(rows=100, requests=3, positions=1500)


def buckets_of(kind: str) -> Buckets:
    share = 29 if "29" in kind else 3
    call = Call(entry=0, heads=2 * share, kv_heads=2, key_size=16, value_size=16, scale=0.25)
    pool = KVPool([call], rows=64, dtype=torch.float32, device=CPU)
    if kind == "torch":
        return StaticBuckets(pool)
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    return TritonBuckets(pool)


@pytest.mark.parametrize("kind", ["torch", "triton", "triton, 29 queries a key"])
def test_every_pass_that_the_settings_allow_has_a_bucket(kind: str) -> None:
    buckets, source = buckets_of(kind), random.Random(0)
    allowed = set(buckets.allowed(LARGEST))
    seen = set()
    for _ in range(600):
        most = source.choice([3, 7, LARGEST.rows // LARGEST.requests])
        batch = []
        for name in "abc"[: source.randint(1, LARGEST.requests)]:
            rows = source.randint(1, most)
            context = source.randint(0, LARGEST.positions - rows)
            batch.append(Rows(request_id=name, context=context, tokens=(0,) * rows, logits=1))
        seen.add(buckets.bucket(batch))
    assert seen <= allowed
    # Larger passes have none.
    long = Rows(request_id="a", context=10 * LARGEST.positions, tokens=(0,) * 5, logits=1)
    assert buckets.bucket([long]) not in allowed
    # And not many more are captured than passes can be.
    assert kind == "torch" or len(allowed) <= 4 * len(row_steps(LARGEST.rows))


class OneRow:
    """Buckets by rows alone."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def allowed(self, largest: Largest) -> list[int]:
        return steps(largest.rows)

    def bucket(self, batch: Sequence[Rows]) -> int:
        return sum(len(rows.tokens) for rows in batch)

    def make(self, bucket: int) -> Any:
        self.made.append(bucket)
        return Laid(bucket)


class Laid:
    """A pass of which only its tokens matter."""

    def __init__(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64)

    def fill(self, batch: Sequence[Rows]) -> None:
        tokens = [token for rows in batch for token in rows.tokens]
        self.tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def enter(self) -> None:
        pass


def graphs(kind: OneRow, **how: Any) -> Graphs:
    def run(laid_out: Any, given: torch.Tensor, layers: Sequence[int], keep: Keep) -> Any:
        return Made(2 * given[:, None], {layer: keep(layer, given[:, None] + layer) for layer in layers})

    return Graphs(kind, run, torch.empty(0, dtype=torch.int64), **how)


def test_a_pass_takes_the_graph_that_keeps_the_fewest_layers_more() -> None:
    kind = OneRow()
    made = graphs(kind)
    made.capture(Largest(rows=4, requests=1, positions=9), {(), (1, 7)})
    assert kind.made == [4, 4, 2, 2, 1, 1], "the largest first"
    rows = Rows(request_id="a", context=0, tokens=(5, 6), logits=1)
    for asked, kept in (((), set()), ((7,), {1, 7}), ((1, 7), {1, 7})):
        run = made.lay_out([rows], asked)
        assert run is not None
        found = run(None)
        assert found.rows.flatten().tolist() == [10, 12] and set(found.seen) == kept
    assert made.lay_out([rows], (3,)) is None
    assert made.lay_out([Rows(request_id="a", context=0, tokens=(5, 6, 7), logits=1)]) is None
    assert kind.made == [4, 4, 2, 2, 1, 1], "nothing is captured while requests wait"


class TritonFailure(Exception):
    """Like Triton's errors, no RuntimeError."""


def out_of_memory_at_the_end() -> None:
    try:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        TritonFailure("Triton Error [CUDA]: out of memory"),
        out_of_memory_at_the_end,
    ],
    ids=["torch", "CUDA", "Triton", "end of the capture"],
)
def test_too_little_memory_at_capture_names_the_settings(failure: Exception | Callable[[], None]) -> None:
    def full(*_: object) -> None:
        if isinstance(failure, Exception):
            raise failure
        failure()

    made = graphs(OneRow(), capture=full)
    with pytest.raises(ConfigurationError) as caught:
        made.capture(Largest(rows=4, requests=2, positions=9), {()})
    assert str(caught.value) == (
        "not enough GPU memory to capture passes of up to 4 rows, 2 requests and 9 positions: it ended after 0 of 3 graphs; "
        "lower verifier.gpu_memory_utilization, verifier.kv_cache_tokens, verifier.max_model_len or verifier.max_num_seqs"
    )


@pytest.mark.parametrize("failure", [RuntimeError("not permitted"), TritonFailure("out of resource: shared memory")])
def test_what_cannot_be_captured_is_launched(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise failure

    made = graphs(OneRow(), capture=fails)
    assert made.capture(Largest(rows=2, requests=1, positions=9), {()}) == 0
    assert f"cannot be captured, so each takes longer: {type(failure).__name__}: {failure}" in caplog.text
    found = made.lay_out([Rows(request_id="a", context=0, tokens=(5, 6), logits=1)])(None)
    assert found is not None and found.rows.flatten().tolist() == [10, 12]


def test_where_our_kernels_are_asked_for_by_name_a_capture_that_fails_is_refused() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    made = graphs(OneRow(), capture=fails, required="triton")
    with refuses(ConfigurationError, "verifier.kernels", "triton", "not permitted when stream is capturing"):
        made.capture(Largest(rows=2, requests=1, positions=9), {()})


def test_what_graphs_keep_lies_in_one_place() -> None:
    made = graphs(OneRow())
    made.capture(Largest(rows=4, requests=1, positions=9), {(7,)})
    places = set()
    for tokens in ((1, 2, 3, 4), (5, 6), (8,)):
        found = made.lay_out([Rows(request_id="a", context=0, tokens=tokens, logits=1)], (7,))(None)
        assert found is not None
        assert found.seen[7].flatten().tolist() == [token + 7 for token in tokens]
        places.add(found.seen[7].data_ptr())
    assert len(places) == 1


def test_rows_are_captured_in_steps_of_8_to_32() -> None:
    found = row_steps(512)
    assert found[::-1] == [1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 513, 32)]
    for rows in range(1, 513):
        assert rows_up(rows) == min(step for step in found if step >= rows)
    assert row_steps(81) == found[found.index(96) :]


def test_the_largest_pass_of_a_configuration() -> None:
    config = TargetConfig(model_path="nowhere", kv_cache_tokens=4096, pass_rows=81, pass_requests=1)
    assert largest_pass(config) == Largest(rows=81, requests=1, positions=4224)
    assert steps(81) == [128, 64, 32, 16, 8, 4, 2, 1] and steps(1) == [1]
