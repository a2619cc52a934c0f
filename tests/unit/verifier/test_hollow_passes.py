"""Operations that are answered by shapes are answered as torch does: by every model type, and on any shapes and strides."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from services.verifier.attention.recording import record
from services.verifier.config import TargetConfig
from services.verifier.kernels.experts import use_noting
from services.verifier.loading import adapters
from services.verifier.loading.hollow import ByShapes
from services.verifier.loading.load_model import hollow_model
from services.verifier.recurrence import functions
from speculation.errors import ConfigurationError
from tests.lossless.architectures import TYPES
from tests.lossless.models_page import NOT_MADE
from tests.lossless.tiny_configs import tiny_config
from tests.tiny_models.tiny import make_tiny_tokenizer

aten = torch.ops.aten


def told(made: Tensor) -> tuple[object, ...]:
    """All that a tensor without numbers says. The strides of axes of one number mean nothing."""
    strides = [stride for stride, size in zip(made.stride(), made.shape, strict=True) if size > 1]
    return made.shape, made.dtype, made.device, strides, made.is_contiguous()


class Compared(ByShapes):
    """Torch's answers, each compared with that by shapes where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = self.asked = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, found = self.answer(func, args, kwargs or {}), func(*args, **(kwargs or {}))
        self.asked += 1
        if made is not None:
            self.answered += 1
            assert told(made) == told(found), (func, args, kwargs)
        return found


@pytest.mark.examples(12)
@pytest.mark.parametrize("kind", sorted(set(TYPES) - set(NOT_MADE)))
def test_of_every_model_type(kind: str, tmp_path: Path) -> None:
    made = tiny_config(kind, make_tiny_tokenizer(tmp_path))
    made.save_pretrained(tmp_path)
    ended = []
    compared = Compared()
    for mode in (nullcontext(), ByShapes(), compared):
        try:
            model = hollow_model(TargetConfig(model_path=str(tmp_path)))
        except ConfigurationError as error:
            pytest.skip(f"refused: {error}")
        adapters.install(model, 1024, model.device)
        functions.install(model)
        use_noting(model)
        try:
            with mode:
                record(model, torch.ones(1, 8, dtype=torch.int64, device="meta"), None)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            ended.append(type(error))
        else:
            ended.append(None)
    # torch alone, and by shapes: what one can run through, the other can.
    assert ended[0] is ended[1] is ended[2]
    assert ended[0] is not None or compared.answered > compared.asked // 4


def any_tensor(draw: random.Random, shape: list[int]) -> Tensor:
    """In any order of axes, with gaps, or repeating."""
    order = draw.sample(range(len(shape)), len(shape))
    kind = draw.choice((torch.float32, torch.bfloat16, torch.float32, torch.int64))
    made = torch.empty([shape[axis] for axis in order], dtype=kind, device="meta")
    if order and draw.random() < 0.3:
        made = torch.cat((made, made), -1)[..., : made.shape[-1]]
    made = made.permute(sorted(range(len(order)), key=order.__getitem__))
    if shape and draw.random() < 0.2:
        axis = draw.randrange(len(shape))
        made = made.narrow(axis, 0, 1).expand(shape)
    return made


def within(draw: random.Random, shape: list[int]) -> list[int]:
    cut = [draw.choice((1, size)) for size in shape]
    return cut[draw.randint(0, len(cut)) :]


def test_on_any_shapes_and_strides() -> None:
    draw, answered = random.Random(1), 0
    for _ in range(1500):
        shape = [draw.choice((1, 1, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
        one = any_tensor(draw, draw.choice((shape, shape, within(draw, shape))))
        other = draw.choice((any_tensor(draw, within(draw, shape)), any_tensor(draw, shape), 2, 0.5))
        axis = draw.randrange(max(1, one.dim()))
        for func, args in (
            (draw.choice((aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)), (one, other)),
            (draw.choice((aten.neg.default, aten.silu.default, aten.gelu.default, aten.rsqrt.default)), (one,)),
            (aten.pow.Tensor_Scalar, (one, 2)),
            (aten.mean.dim, (one, [axis], draw.random() < 0.5)),
            (aten.cat.default, ([one, one], draw.choice((axis, axis - one.dim())))),
            (aten.linear.default, (one, torch.empty((5, (one.shape or (1,))[-1]), dtype=one.dtype, device="meta"))),
        ):
            try:
                found = func(*args)
            except (RuntimeError, IndexError):
                # Whoever asks for it must hear of it.
                assert ByShapes.answer(func, args, {}) is None
                continue
            if (made := ByShapes.answer(func, args, {})) is not None:
                answered += 1
                assert told(made) == told(found), (func, told(one), told(other) if isinstance(other, Tensor) else other)
    assert answered > 3000
