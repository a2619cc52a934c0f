"""Hidden states in the index: what is found, what is refused, interrupted builds, FAISS's kinds of index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typing_extensions import override

from cluster.build import Pipeline
from retrieval_index import state_index
from retrieval_index.builder import BuildConfig, ScoringTarget, build_index
from retrieval_index.index import open_index
from retrieval_index.manifest import END, FILE, SEMANTIC
from retrieval_index.perplexity import ModelScorer
from retrieval_index.state_index import StateIndex, kind_for
from services.api.messages import ClientRequest, Completion, RequestedSampling
from services.drafter.sources.semantic import Semantic
from services.model_files.folder import tokenizer_digest
from speculation.errors import ConfigurationError
from speculation.messages import Continuation, OpenSession, RetrievalQuery, StepReport
from speculation.types import Features, Observation
from tests.drafters.indexes import STATES, ByteScorer, build, document
from tests.running.refusals import refuses
from tests.servers.service import pipeline


def features(*rows: NDArray[np.float16]) -> Features:
    data = np.stack(rows).astype("<f2")
    return Features(data=data.tobytes(), rows=len(rows), width=data.shape[1], dtype="float16")


def asking(after: str, chosen: str, *, most: int = 16, length: int = 10) -> RetrievalQuery:
    """What followed where the state was that of ``after``, and ``chosen`` came next."""
    state = features(STATES[ord(after)])
    return RetrievalQuery(suffix=(ord(chosen),), max_continuations=most, max_length=length, state=state)


def found(hits: Sequence[Continuation]) -> dict[str, int]:
    return {bytes(hit.tokens).decode(): hit.count for hit in hits}


def test_what_followed_the_nearest_states_is_found(tmp_path: Path) -> None:
    manifest = build(tmp_path, ["qabcd", "xabcd", "xaXYZ", "qaLMN"], semantic=True)
    assert manifest.semantic
    assert not (tmp_path / "scores" / "states.f16").exists()
    index = open_index(tmp_path, state_width=16)
    answers = index.look_up([asking("x", "a"), asking("a", "b", length=1), asking("a", "q")])
    # The states after x, and what came after their next token a, before what came after q and a: the nearest first.
    after_x = found(answers[0].continuations)
    assert after_x == {"bcd": 2, "XYZ": 1, "LMN": 1}
    assert list(after_x)[2] == "LMN"
    assert found(answers[1].continuations) == {"c": 2}
    # No state was followed by q.
    assert not answers[2].continuations
    assert {answer.index_version for answer in answers} == {manifest.version}
    # Suffixes are found as ever.
    assert index.look_up([RetrievalQuery(suffix=tuple(b"xa"), max_continuations=4, max_length=4)])[0].continuations


def test_nothing_runs_over_a_documents_end(tmp_path: Path) -> None:
    # 64 tokens are computed at once: documents of that length and around it, and one that fills a whole pass.
    texts = [chr(97 + n) * length for n, length in enumerate((63, 64, 65, 128, 1, 2048))]
    scorer = ByteScorer()
    build(tmp_path, texts, scorer=scorer, semantic=True)
    assert all(scorer.computed), "a model cannot read nothing"
    index = open_index(tmp_path, state_width=16)
    for text in (text for text in texts if len(text) > 1):
        for hit in index.look_up([asking(text[0], text[0], most=64, length=64)])[0].continuations:
            assert set(hit.tokens) == {ord(text[0])}
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype="<u4")
    assert len(tokens) == sum(len(text) + 1 for text in texts)
    assert (tokens == END).sum() == len(texts)


def test_an_index_without_states_finds_none_and_is_refused_where_they_are_wanted(tmp_path: Path) -> None:
    manifest = build(tmp_path, ["abcdabcd"])
    assert not manifest.semantic
    assert not open_index(tmp_path).look_up([asking("a", "b")])[0].continuations
    with refuses(ConfigurationError, says="holds no hidden states: build it with --semantic"):
        open_index(tmp_path, state_width=16)


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    build(tmp_path, ["abcdabcd"], semantic=True)
    with refuses(ConfigurationError, says="of 16 numbers, the served model's have 8"):
        open_index(tmp_path, state_width=8)
    index = open_index(tmp_path, state_width=16)
    query = asking("a", "b")
    assert index.look_up([query])[0].continuations
    for state in (
        features(np.zeros(8, dtype=np.float16)),
        features(STATES[0], STATES[1]),
        Features(data=bytes(64), rows=1, width=16, dtype="float32"),
    ):
        found_nothing, fine = index.look_up([replace(query, state=state), query])
        assert not found_nothing.continuations
        assert fine.continuations


def test_states_of_a_model_that_computes_in_bfloat16_find_the_same(tmp_path: Path) -> None:
    build(tmp_path, ["qabcd", "xabcd", "xaXYZ", "qaLMN"], semantic=True)
    index = open_index(tmp_path, state_width=16)
    query = asking("x", "a")
    state = torch.from_numpy(STATES[ord("x")]).bfloat16()
    data = state.view(torch.int16).numpy().astype("<i2").tobytes()
    rounded = replace(query, state=Features(data=data, rows=1, width=16, dtype="bfloat16"))
    wanted, made = (found(answer.continuations) for answer in index.look_up([query, rounded]))
    assert made == wanted == {"bcd": 2, "XYZ": 1, "LMN": 1}
    assert list(made) == list(wanted)


def test_an_index_built_anew_without_states_has_none(tmp_path: Path) -> None:
    build(tmp_path, ["abcdabcd"], semantic=True)
    build(tmp_path, ["abcdabcd"])
    assert not [name for name in SEMANTIC if (tmp_path / name).exists()]


@pytest.mark.parametrize("part", SEMANTIC)
def test_damaged_states_are_refused(tmp_path: Path, part: str) -> None:
    build(tmp_path, ["abcdabcd"], semantic=True)
    content = bytearray((tmp_path / part).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / part).write_bytes(content)
    with refuses(ConfigurationError, tmp_path / part):
        open_index(tmp_path)
    (tmp_path / part).write_bytes(content[:-4])
    with pytest.raises(ConfigurationError):
        StateIndex(tmp_path)


def test_an_interrupted_build_computes_no_state_twice(tmp_path: Path) -> None:
    texts = [chr(97 + n) * (50 + 40 * n) for n in range(20)]

    class Interrupted(ByteScorer):
        @override
        def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
            if len(self.computed) > 40:
                raise KeyboardInterrupt
            return super().states(documents)

    first, second = Interrupted(), ByteScorer()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", texts, scorer=first, semantic=True)
    assert not (tmp_path / "i" / FILE).exists()
    # A crash in the middle of a write.
    with (tmp_path / "i" / "scores" / "states.f16").open("ab") as file:
        file.write(bytes(33))
    resumed = build(tmp_path / "i", texts, scorer=second, semantic=True)
    whole = ByteScorer()
    assert resumed.version == build(tmp_path / "whole", texts, scorer=whole, semantic=True).version
    assert 40 < len(first.computed) < len(whole.computed)
    assert len(first.computed) + len(second.computed) <= len(whole.computed) + 1


def test_states_of_other_documents_are_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "i" / "scores").mkdir(parents=True)
    (tmp_path / "i" / "scores" / "states.key").write_text("0123 16")
    (tmp_path / "i" / "scores" / "states.f16").write_bytes(bytes(3200))
    made = build(tmp_path / "i", ["abcdabcd"], semantic=True)
    assert made.version == build(tmp_path / "fresh", ["abcdabcd"], semantic=True).version


def test_the_kind_of_index_goes_by_its_size() -> None:
    assert kind_for(1_000, 576) == "SQfp16"
    assert kind_for(1_000_000, 576) == "IVF4000,SQ8"
    assert kind_for(10_000_000, 576) == "IVF12649,PQ72x8"
    assert kind_for(10_000_000, 575) == "IVF12649,SQ8"


@pytest.mark.parametrize("most", ["_EXACT_UP_TO", "_BYTES_UP_TO"])
def test_every_kind_finds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    for name in ("_EXACT_UP_TO", most):
        monkeypatch.setattr(state_index, name, 100)
    source = np.random.default_rng(1)
    states = source.standard_normal((4000, 32)).astype(np.float16)
    tokens = np.arange(4000, dtype=np.uint32)
    state_index.build(states, tokens, tmp_path)
    assert kind_for(*states.shape) == ("IVF252,SQ8" if most == "_EXACT_UP_TO" else "IVF252,PQ4x8")
    index = StateIndex(tmp_path)
    hits = 0
    for n in source.permutation(3990)[:50].tolist():
        answer = index.look_up(states[n].astype(np.float32), n + 1, 8, 3)
        hits += any(hit.tokens == (n + 2, n + 3, n + 4) for hit in answer)
    assert hits >= 48


@pytest.mark.parametrize("fails", [False, True])
def test_where_faiss_sees_a_gpu_the_states_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Answers are those of the processor, with a double of FAISS's classes for GPUs; also if the index does not fit there."""
    monkeypatch.setattr(state_index, "_EXACT_UP_TO", 100)
    states = np.random.default_rng(1).standard_normal((2000, 32)).astype(np.float16)
    state_index.build(states, np.arange(2000, dtype=np.uint32), tmp_path)
    plain, searched, set_aside = StateIndex(tmp_path), list[int](), list[int]()

    class Resources:
        def setTempMemory(self, size: int) -> None:  # FAISS's name
            set_aside.append(size)

    class Moved:
        def __init__(self, index: Any) -> None:
            self.index = index

        def search(self, queries: NDArray[np.float32], most: int) -> Any:
            searched.append(len(queries))
            return self.index.search(queries, most)

    def move(resources: Resources, device: int, index: Any) -> Moved:
        assert isinstance(resources, Resources)
        assert (device, index.nprobe) == (0, state_index._PROBED)
        if fails:
            raise RuntimeError("Error in alloc:\n out of memory")
        return Moved(index)

    monkeypatch.setattr(state_index.faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(state_index.faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(state_index.faiss, "index_cpu_to_gpu", move, raising=False)
    index = StateIndex(tmp_path)
    for n in range(0, 1900, 100):
        asked = states[n].astype(np.float32), n + 1, 8, 3
        assert index.look_up(*asked) == plain.look_up(*asked)
    assert len(searched) == (0 if fails else 19)
    assert set_aside == [64 << 20]
    assert ("stays on the processor: Error in alloc: out of memory" in caplog.text) == fails


def test_a_models_states_are_what_its_output_layer_reads(tiny_model: Path) -> None:
    scorer = ModelScorer(tiny_model)
    texts = [[5, 6, 7, 8], [9, 10]]
    (one, two) = scorer.states(texts)
    assert (len(one), len(two)) == (4, 2)
    with torch.inference_mode():
        model = scorer._model
        logits = model(torch.tensor([texts[0]])).logits[0]
        again = model.get_output_embeddings()(torch.from_numpy(one.astype(np.float32)))
    torch.testing.assert_close(again, logits, atol=2e-2, rtol=2e-2)


def test_the_source_asks_with_the_state_that_the_last_token_was_chosen_from() -> None:
    session = Semantic().open(OpenSession(session_id="s", tokens=(1, 2), prompt_length=2, sources=(), max_nodes=8))
    assert session.query() is None
    assert len(session.draft(8)) == 0
    seen = Observation(features=features(STATES[1], STATES[2]))
    session.observe(
        StepReport(
            session_id="s", committed=(7, 8), length=4, prefix_hash=0, accepted_path=(0,), max_nodes=8, observation=seen
        )
    )
    query = session.query()
    assert query is not None
    assert query.suffix == (8,)
    assert query.state == features(STATES[2])
    session.found([Continuation(tokens=(4, 5), count=2, match_length=1), Continuation(tokens=(6,), count=1, match_length=1)])
    tree = session.draft(8)
    assert tree.tokens == (4, 5, 6)
    assert tree.parents == (-1, 0, -1)
    # Without features nothing is asked.
    session.observe(StepReport(session_id="s", committed=(9,), length=5, prefix_hash=0, accepted_path=(), max_nodes=8))
    assert session.query() is None
    assert len(session.draft(8)) == 0


@pytest.mark.exhaustive
async def test_from_the_corpus_to_accepted_nodes(tiny_model: Path, tmp_path: Path) -> None:
    """An index of what the model would answer: its states are found again while it answers, over stages as well."""

    async def answer(running: Pipeline, strategy: str) -> tuple[list[int], Completion]:
        sampling = RequestedSampling(max_tokens=50, ignore_eos=True, temperature=0.9, seed=5)
        wanted = ClientRequest(input=(40, 41, 42, 43), sampling=sampling, strategy=strategy, tenant="")
        events = [event async for event in running.router.generate(wanted)]
        assert isinstance(events[-1], Completion)
        return [token for event in events[:-1] for token in event.token_ids], events[-1]

    async with pipeline(tiny_model) as running:
        plain, _ = await answer(running, "autoregressive")
    target = ScoringTarget(name="tiny", tokenizer_sha256=tokenizer_digest(tiny_model), vocab_size=320)
    config = BuildConfig(keep=1.0, semantic=True)
    text = [40, 41, 42, 43, *plain]
    build_index([document("answer")], target, lambda _: text, lambda: ModelScorer(tiny_model), tmp_path / "i", config)
    flags = (f"retrieval.index={tmp_path / 'i'}", "retrieval.semantic=true", "drafter.retrieval_deadline_s=1")
    for stages in (1, 2):
        async with pipeline(tiny_model, *flags, "verifier.draft_deadline_s=1", f"verifier.stages={stages}") as running:
            for strategy in ("semantic", "blend"):
                tokens, done = await answer(running, strategy)
                assert tokens == plain
                assert done.stats.num_spec_steps < 25, strategy
                # In the blend a token that several sources name counts for the first.
                assert strategy == "blend" or done.stats.accepted_by_source["semantic"] > 20
