"""Hidden states that stay on the target's device: the numbers that a drafter elsewhere would be sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.component_configs import states_stay
from cluster.settings.config import load
from services.drafter.heads.session import state_numbers
from services.drafter.sessions.known_states import KnownStates, row_of
from services.links.codec.features import decode_features, detach_data, encode_features, split
from services.links.in_process import _with_data
from services.machine.device_states import DeviceStates, apart
from services.verifier.config import TargetConfig
from services.verifier.engine.kept_features import pieces, rows_from
from services.verifier.loading.memory import drafters_bytes
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.messages import FeatureChunk
from speculation.types import Features

LAYERS, WIDTH = (0, 3, -1), 12


def pair(rows: int, start: int = 0, dtype: torch.dtype = torch.float16) -> tuple[Features, Features]:
    """The same states on a device and in bytes."""
    numbers = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows + start)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    on_device = Features(data=DeviceStates(numbers), rows=rows, width=WIDTH, dtype=name, start=start, layers=LAYERS)
    data = numbers.view(torch.int16).numpy().astype("<i2").tobytes()
    return on_device, replace(on_device, data=data)


def alike(one: Features | None, other: Features | None) -> None:
    assert one is not None and other is not None
    assert isinstance(one.data, DeviceStates) and isinstance(other.data, bytes)
    assert len(one.data) == len(other.data) and replace(one, data=bytes(one.data)) == other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parts_are_those_of_the_bytes(dtype: torch.dtype) -> None:
    held, sent = pair(7, 20, dtype)
    alike(held, sent)
    alike(held.part(2, 5), sent.part(2, 5))
    alike(rows_from(held, 23), rows_from(sent, 23))
    for layers in (LAYERS, (-1,), (3, 0), (-1, 0, 3)):
        alike(held.of_layers(layers), sent.of_layers(layers))
        alike(row_of(held, 4, layers), row_of(sent, 4, layers))
    more = pair(2, 27, dtype), pair(1, 29, dtype)
    alike(held.followed_by([each[0] for each in more]), sent.followed_by([each[1] for each in more]))
    # Some come over another way: bytes then.
    assert held.followed_by([more[0][1]]).data == sent.followed_by([more[0][1]]).data
    assert sent.followed_by([more[0][0]]).data == sent.followed_by([more[0][1]]).data
    for one, other in zip(split(held, 60), split(sent, 60), strict=True):
        alike(one, other)


def test_joined_pieces_are_those_of_the_bytes() -> None:
    made = [pair(3, 0), pair(1, 3), pair(4, 4), pair(2, 11)]
    for most in (30, 100, 10_000):
        pairs = zip(pieces([one for one, _ in made], most), pieces([other for _, other in made], most), strict=True)
        for held, sent in pairs:
            alike(held, sent)


def test_a_head_reads_the_same_numbers_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownStates(), KnownStates()
    for held, sent in (pair(5), pair(3, 5)):
        known[0].add(held)
        known[1].add(sent)
    assert known[0].size == known[1].size
    like = torch.zeros(2 * WIDTH // len(LAYERS))
    for positions in ([1, 2, 4, 5, 6], [7], range(8)):
        one, other = (each.runs(positions) for each in known)
        for held, sent in zip(one, other, strict=True):
            alike(held, sent)
            expected = state_numbers(sent, (3, 0), like)
            with monkeypatch.context() as patch:
                patch.delattr(DeviceStates, "__bytes__")
                assert torch.equal(state_numbers(held, (3, 0), like), expected)


def test_a_link_within_the_process_hands_over_what_lies_on_the_device() -> None:
    held, sent = pair(4)
    arrived = _with_data(FeatureChunk(session_id="s", features=held))
    assert isinstance(arrived, FeatureChunk) and isinstance(arrived.features.data, DeviceStates)
    assert isinstance(held.data, DeviceStates) and arrived.features.data.numbers is held.data.numbers
    bare, data = detach_data(FeatureChunk(session_id="s", features=held))
    assert isinstance(bare, FeatureChunk) and bare.features.data == b"" and data is held.data
    # Over gRPC they travel as bytes.
    assert decode_features(encode_features(held)) == sent


def test_rows_lie_apart() -> None:
    rows = torch.arange(12.0).view(6, 2)
    made = apart(rows, [1, 3, 0, 2])
    assert [each.tolist() for each in made] == [rows[:1].tolist(), rows[1:4].tolist(), [], rows[4:].tolist()]
    assert len({each.untyped_storage().data_ptr() for each in made if len(each)}) == 3
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in made)


def observed(target: TransformersTarget, asked: dict[str, list[int]]) -> Iterable[Features]:
    batch = [
        Rows(request_id="a", context=0, tokens=(5, 6, 7, 8, 9), parents=(-1, 0), logits=3, layers=(0, -1)),
        Rows(request_id="b", context=0, tokens=(9, 8), logits=1, layers=(0, -1)),
        Rows(request_id="c", context=0, tokens=(3,), logits=1, layers=(1,)),
    ]
    for rows in batch:
        target.open(rows.request_id, 40)
    target.begin(batch)
    target.finish()
    target.fetch_features(asked)
    return [target.features(name, rows) for name, rows in asked.items()]


def test_a_target_makes_the_same_states(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}
    config: dict[str, Any] = {"model_path": str(tiny_model), "kv_cache_tokens": 512, "threads": 1}
    sent = observed(TransformersTarget(TargetConfig(**config)), asked)
    target = TransformersTarget(TargetConfig(**config, states_stay=True))
    copied: list[tuple[int, ...]] = []
    numpy = torch.Tensor.numpy
    with monkeypatch.context() as patch:
        # What is as wide as a state must not come to the host.
        patch.setattr(torch.Tensor, "cpu", lambda self: copied.append(tuple(self.shape)) or self)
        patch.setattr(torch.Tensor, "numpy", lambda self, *more: copied.append(tuple(self.shape)) or numpy(self, *more))
        held = observed(target, asked)
    widths = (target._part.hidden_size, 2 * target._part.hidden_size)
    # Blocks of the cache, which have more dimensions, lie on the host.
    assert not [shape for shape in copied if 0 < len(shape) < 4 and shape[-1] in widths]
    for one, other in zip(held, sent, strict=True):
        alike(one, other)
    # Those of rows that nobody was told of are fetched when they are asked for.
    alike(target.features("a", [2, 4]), replace(target.features("a", [2, 4]), data=bytes(target.features("a", [2, 4]).data)))
    whole = target.features("a", [0, 1, 2, 3])
    assert isinstance(whole.data, DeviceStates)
    parts = [target.features("a", rows) for rows in ([0, 1], [2, 3])]
    assert bytes(whole.data) == b"".join(bytes(part.data) for part in parts)
    assert np.frombuffer(bytes(whole.data), dtype="<f2").shape == (4 * 2 * target._part.hidden_size,)


@pytest.mark.parametrize(
    ("settings", "in_process", "stay"),
    [
        ([], True, True),
        ([], False, False),
        (["drafter.models_in=verifier"], False, True),
        (["drafter.address=there:1"], True, False),
        (["retrieval.semantic=true"], True, False),
        (["verifier.stages=2"], True, False),
        (["verifier.tensor_parallel_size=2"], True, False),
        (["verifier.device=cuda", "drafter.device=cuda:0"], True, True),
        (["verifier.device=cuda", "drafter.device=cuda:1"], True, False),
        (["verifier.device=cuda"], True, False),
    ],
    ids=str,
)
def test_who_shares_the_device(settings: list[str], in_process: bool, stay: bool) -> None:
    assert states_stay(load(None, settings, {}), in_process=in_process) is stay


@pytest.mark.parametrize("layers", [(-1,), ()], ids=str)
def test_the_plan_of_memory_knows_what_is_kept(layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_configs, "observed_layers", lambda *asked: layers)
    on_gpu = [
        "verifier.device=cuda",
        "drafter.device=cuda",
        "drafter.models_in=verifier",
        "verifier.kept_feature_bytes=1000",
    ]
    model = ResolvedModel(name="m", path=Path("m"))
    target = component_configs.verifier_config(load(None, on_gpu, {}), model).target
    # The loop's, and those of the drafter's sessions.
    assert drafters_bytes(target) == (1000 + 2**30 if layers else 0)


def test_a_part_does_not_hold_the_memory_of_the_rest() -> None:
    whole = DeviceStates(torch.ones(64, 4, dtype=torch.float16))
    part = whole.rows(8, 16)
    assert part.numbers.untyped_storage().nbytes() == len(part) and torch.equal(part.numbers, whole.numbers[8:16])
    assert whole.rows(0, 64).numbers is whole.numbers
