"""Speculative streams: what they compute against the paper's formulas written plainly, and what a session keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from services.drafter.heads import session
from services.drafter.heads.levels import LevelTrees
from services.drafter.heads.session import FeatureSession
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.source import StreamSource
from services.drafter.heads.streams.streams import Streams
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession, StepReport
from speculation.types import Features, TokenTree
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_streams

LAYERS, TOP, STREAMS = 4, 2, 3
TEXT = np.random.default_rng(7).integers(4, 300, 60).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(target: Path) -> Path:
    return make_streams(target, target.parent / "streams", layers=TOP, streams=STREAMS)


class Bare:
    """The target as transformers computes it, in float64."""

    def __init__(self, target: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, attn_implementation="eager")

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The states [n, h] that the last layers read, and the keys [heads, n, width] that each of these makes."""
        out = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=True)
        keys = [out.past_key_values.layers[LAYERS - TOP + number].keys[0] for number in range(TOP)]
        return out.hidden_states[LAYERS - TOP][0], keys


@pytest.fixture(scope="module")
def bare(target: Path) -> Bare:
    return Bare(target)


class Recorder:
    """A source that notes what the output layer reads of streams, [sessions, gamma, h]."""

    def __init__(self, folder: Path, target: Path, window: int = 1000) -> None:
        self.streams: Streams = load_streams(folder, target).double()
        self.source = StreamSource(self.streams, window=window)
        self.hidden: dict[str, torch.Tensor] = {}
        trees = cast(LevelTrees, self.source._trees)
        # The output layer is float32.
        self.streams.output.logits = lambda hidden, vocabulary: functional.linear(  # type: ignore[method-assign]
            hidden.float(), vocabulary.rows
        )

        def grow(wanted: Sequence[DraftWanted], hidden: torch.Tensor) -> list[TokenTree]:
            self.hidden = {each.session.name: rows for each, rows in zip(wanted, torch.split(hidden, STREAMS), strict=True)}
            return LevelTrees.grow(trees, wanted, hidden)

        trees.grow = grow  # type: ignore[method-assign]


class Request:
    """A request whose states are the bare model's."""

    def __init__(self, recorder: Recorder, bare: Bare, prompt: int, name: str = "r") -> None:
        self.name, self.bare, self.length = name, bare, prompt
        self.session: FeatureSession = recorder.source.open(
            OpenSession(
                session_id=name, tokens=tuple(TEXT[:prompt]), prompt_length=prompt, sources=("streaming",), max_nodes=8
            )
        )
        self.session.name = name  # type: ignore[attr-defined]
        self.states = KnownStates()

    def commit(self, count: int, known: bool = True) -> None:
        begin = max(0, self.length - 1)
        self.length += count
        if known:
            rows = self.bare.read(TEXT[: self.length])[0][begin : self.length - 1].float().numpy()
            self.states.add(
                Features(
                    data=np.ascontiguousarray(rows).tobytes(),
                    rows=len(rows),
                    width=rows.shape[1],
                    dtype="float32",
                    start=begin,
                    layers=(LAYERS - TOP - 1,),
                )
            )
        committed = tuple(TEXT[self.length - count : self.length])
        self.session.observe(
            StepReport(
                session_id=self.name,
                committed=committed,
                length=self.length,
                prefix_hash=0,
                accepted_path=tuple(range(count - 1)),
                max_nodes=8,
            )
        )

    @property
    def wanted(self) -> DraftWanted:
        return DraftWanted(session=self.session, max_nodes=8, states=self.states)


def prompt_states(request: Request) -> None:
    """The states of the prompt arrive, too."""
    rows = request.bare.read(TEXT[: request.length])[0].float().numpy()[: request.length - 1]
    data = np.ascontiguousarray(rows).tobytes()
    layers = (LAYERS - TOP - 1,)
    request.states.add(Features(data=data, rows=len(rows), width=rows.shape[1], dtype="float32", start=0, layers=layers))


def expected(bare: Bare, streams: Streams, tokens: Sequence[int]) -> torch.Tensor:
    """[gamma, h] of the streams of the last position but one, from the whole model and one mask matrix.

    Main rows are 0..t, streams stand behind them. Stream j starts from M_t + P_j, stands at position t + j, sees main rows
    up to t and streams up to j; its weights are W + (alpha / r) B A on q, v, o and down.
    """
    t, config = len(tokens) - 2, bare.model.config
    state = bare.read(tokens[: t + 1])[0]
    trained = {name: each.detach().double() for name, each in streams.trained()}
    scale = streams.config.alpha / streams.config.rank
    rows = torch.cat((state, state[t] + trained["stream_embeddings"]))
    main = t + 1
    at = torch.cat((torch.arange(main), t + 1 + torch.arange(STREAMS)))
    seen = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for row in range(len(rows)):
        for column in range(len(rows)):
            # A stream sees what a row at t sees, and its own; a main row sees no stream.
            seen[row, column] = column <= row if row < main or column >= main else True
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    half = width // 2
    theta = config.rope_parameters["rope_theta"]
    angles = at[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float32).double() * 2 / width)

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * weight / (rows.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def turn(each: torch.Tensor) -> torch.Tensor:
        one, two = each[..., :half], each[..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    for number in range(LAYERS - TOP, LAYERS):
        layer = bare.model.model.layers[number]

        def product(name: str, rows: torch.Tensor, layer: torch.nn.Module = layer, number: int = number) -> torch.Tensor:
            made = rows @ layer.get_parameter(f"{name}.weight").T
            if f"layers.{number}.{name}.lora_A.weight" in trained:
                down, up = (trained[f"layers.{number}.{name}.lora_{part}.weight"] for part in "AB")
                made[main:] += scale * (rows[main:] @ down.T @ up.T)
            return made

        read = norm(rows, layer.input_layernorm.weight)
        query = turn(product("self_attn.q_proj", read).view(-1, heads, width))
        key = turn(product("self_attn.k_proj", read).view(-1, groups, width))
        value = product("self_attn.v_proj", read).view(-1, groups, width)
        out = torch.zeros(len(rows), heads, width, dtype=torch.float64)
        for head in range(heads):
            group = head * groups // heads
            scores = query[:, head] @ key[:, group].T / math.sqrt(width)
            out[:, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, group]
        rows = rows + product("self_attn.o_proj", out.flatten(1))
        read = norm(rows, layer.post_attention_layernorm.weight)
        gate = product("mlp.gate_proj", read)
        rows = rows + product("mlp.down_proj", gate * torch.sigmoid(gate) * product("mlp.up_proj", read))
    return norm(rows[main:], bare.model.model.norm.weight)


def drafted(recorder: Recorder, *requests: Request) -> list[TokenTree]:
    trees = recorder.source.draft([request.wanted for request in requests])
    assert all(tree is not None for tree in trees)
    return [tree for tree in trees if tree is not None]


@torch.no_grad()
def test_streams_compute_their_formulas_whatever_the_steps(folder: Path, target: Path, bare: Bare) -> None:
    recorder = Recorder(folder, target)
    one, other = Request(recorder, bare, 20, "one"), Request(recorder, bare, 3, "other")
    for request in (one, other):
        prompt_states(request)
    for step in (1, 3, 1, 5):
        one.commit(step)
        other.commit(2)
        drafted(recorder, one, other)
        for request in (one, other):
            found = expected(bare, recorder.streams, TEXT[: request.length])
            assert torch.allclose(recorder.hidden[request.name], found, atol=1e-5), (step, request.name)
    # Streams leave nothing behind: main rows' keys are those of the bare model.
    for request in (one, other):
        rows = request.length - 1
        assert request.session.cache.end == rows
        for number, keys in enumerate(bare.read(TEXT[:rows])[1]):
            own = request.session.cache.of(number)[0][:, :rows]
            assert torch.allclose(own, keys, atol=1e-5)


@torch.no_grad()
def test_a_cache_that_was_cleared_is_made_anew(folder: Path, target: Path, bare: Bare) -> None:
    recorder = Recorder(folder, target)
    request = Request(recorder, bare, 30)
    prompt_states(request)
    request.commit(2)
    (tree,) = drafted(recorder, request)
    request.session.cache.clear()
    again = recorder.source.draft([request.wanted])
    assert again == [tree]


def test_a_failed_pass_leaves_no_rows_that_count(folder: Path, target: Path, bare: Bare) -> None:
    recorder = Recorder(folder, target)
    request = Request(recorder, bare, 10)
    prompt_states(request)
    request.commit(2)
    # After the first layer's keys have been kept.
    norm = recorder.streams.own.layers[1].input_layernorm
    weight = norm.weight
    norm.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(RuntimeError):
        recorder.source.draft([request.wanted])
    norm.weight = weight
    drafted(recorder, request)
    assert torch.allclose(recorder.hidden["r"], expected(bare, recorder.streams, TEXT[: request.length]), atol=1e-5)


def test_rows_that_have_no_room_fail_and_count_for_nobody(
    folder: Path, target: Path, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(folder, target)
    one, other = Request(recorder, bare, 10, "one"), Request(recorder, bare, 12, "other")
    for request in (one, other):
        prompt_states(request)
        request.commit(2)

    def lacking(end: int, tree: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(other.session.cache, "reserve", lacking)
        with pytest.raises(MemoryError):
            recorder.source.draft([one.wanted, other.wanted])
    drafted(recorder, one, other)
    for request in (one, other):
        found = expected(bare, recorder.streams, TEXT[: request.length])
        assert torch.allclose(recorder.hidden[request.name], found, atol=1e-5), request.name


def test_long_texts_take_several_calls(folder: Path, target: Path, bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams were asked of the first call, too, which has none: such a request was not drafted for."""
    monkeypatch.setattr(session, "_FEW", 4)
    monkeypatch.setattr(session, "_ALONE", 16)
    recorder = Recorder(folder, target)
    request = Request(recorder, bare, 40)
    prompt_states(request)
    request.commit(2)
    assert [recorder.source.draft([request.wanted]) for _ in range(2)] == [[None], [None]]
    drafted(recorder, request)
    assert torch.allclose(recorder.hidden["r"], expected(bare, recorder.streams, TEXT[: request.length]), atol=1e-5)


def test_it_waits_for_the_last_rows_state(folder: Path, target: Path, bare: Bare) -> None:
    recorder = Recorder(folder, target)
    request = Request(recorder, bare, 10)
    prompt_states(request)
    request.commit(2, known=False)
    assert recorder.source.draft([request.wanted]) == [None]
    request.commit(1)
    (tree,) = drafted(recorder, request)
    assert len(tree) == 8
    # Levels are no deeper than there are streams, and a path is as likely as the product of its levels.
    depths: list[int] = []
    for node, parent in enumerate(tree.parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        assert parent < 0 or tree.scores[node] <= tree.scores[parent]
    assert max(depths) <= STREAMS
