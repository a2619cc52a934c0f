"""The draft vocabulary: frequent tokens, low ids, what ends a turn; and how much of held-out answers it covers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from training.data_manifest import DataManifest, DataSampling, DataTarget, read_data_manifest, write_manifest
from training.shards import TrainingSequence, read_shards, write_shard
from training.vocabulary import RECORD, TENSORS, build_vocabulary, choose_ids, read_vocabulary, write_vocabulary

VOCAB, EOS = 100, 97


def sequence(prompt: list[int], answer: list[int], domain: str = "math") -> TrainingSequence:
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    states = np.zeros((len(tokens), 4), dtype=np.float16)
    known = np.ones(len(tokens), dtype=np.bool_)
    return TrainingSequence(
        tokens=tokens, prompt_length=len(prompt), states=states, known=known, domain=domain, temperature=0.0
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers of 50s and 60s; prompts of 90s, which do not count; held out: half of the math, all of the code."""
    train = [sequence([90, 91], [50, 50, 50, 60, 60, 70]), sequence([92], [50, 60], "code")]
    held_out = [sequence([93], [50, 2, 80, 81]), sequence([94], [80, 60, 60, 60], "code")]
    target = DataTarget(
        name="tiny", weights_sha256="w", tokenizer_sha256="t", vocab_size=VOCAB, hidden_size=4, eos_token_ids=(EOS,)
    )
    sampling = DataSampling(max_new_tokens=8, samples_per_prompt=1, max_prompt_tokens=8, shard_sequences=4, seed=0)
    domains = ("math", "code")
    entry = write_shard(tmp_path, 0, [*train, *held_out], domains, [False, False, True, True])
    manifest = DataManifest(
        target=target, layers=(-1,), sampling=sampling, domains=domains, prompts=4, prompts_sha256="p", shards=(entry,)
    )
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_shards_are_of_their_split(data: Path) -> None:
    assert [s.tokens[0] for s in read_shards(data, "train")] == [90, 92]
    assert [s.tokens[0] for s in read_shards(data, "validation")] == [93, 94]
    whole = read_shards(data)
    assert whole.lengths == [8, 3, 5, 5] and whole.rows == 21 and len(whole) == 4
    assert [s.domain for s in whole] == ["math", "code", "math", "code"]


def test_three_quarters_are_frequent_and_the_rest_are_low(data: Path) -> None:
    chosen = build_vocabulary(data, 5)
    # What ends a turn, the two most frequent ones, and the two lowest ids.
    assert chosen.ids.tolist() == [0, 1, 50, 60, EOS]
    assert chosen.record.counted == 8
    assert chosen.record.recall == {"all": 4 / 8, "math": 1 / 4, "code": 3 / 4}


def test_it_comes_back_as_it_was_written(data: Path) -> None:
    chosen = build_vocabulary(data, 10)
    write_vocabulary(data, chosen)
    found = read_vocabulary(data, read_data_manifest(data))
    assert found.ids.tolist() == chosen.ids.tolist()
    assert found.record == chosen.record
    # EAGLE's form.
    assert (found.d2t + np.arange(10)).tolist() == np.flatnonzero(found.t2d).tolist()
    assert found.t2d.sum() == 10 and found.t2d[EOS]


@pytest.mark.parametrize("size", [2, 3, 50, VOCAB])
def test_every_size_is_met(size: int) -> None:
    counts = np.arange(VOCAB) % 7
    ids = choose_ids(counts, size, [EOS, 0])
    assert len(ids) == size == len(set(ids.tolist()))
    assert {EOS, 0} <= set(ids.tolist())
    assert ids.tolist() == sorted(ids.tolist())


@pytest.mark.parametrize("size", [0, 1, VOCAB + 1])
def test_sizes_that_do_not_fit_are_refused(size: int, data: Path) -> None:
    with refuses(ConfigurationError, "--size", size, allowed=f"from 2 to {VOCAB}"):
        build_vocabulary(data, size)


def test_what_does_not_fit_the_data_is_refused(data: Path) -> None:
    manifest = read_data_manifest(data)
    with refuses(ConfigurationError, says="holds no draft vocabulary"):
        read_vocabulary(data, manifest)
    write_vocabulary(data, build_vocabulary(data, 10))
    other = manifest.model_copy(update={"target": manifest.target.model_copy(update={"tokenizer_sha256": "u"})})
    with refuses(ConfigurationError, says="is for tiny, not tiny"):
        read_vocabulary(data, other)
    content = (data / RECORD).read_text()
    (data / RECORD).write_text(content.replace('"size": 10', '"size": 11'))
    with refuses(ConfigurationError, says="d2t and t2d disagree"):
        read_vocabulary(data, manifest)
    (data / RECORD).write_text("{}")
    with refuses(ConfigurationError, says="is damaged"):
        read_vocabulary(data, manifest)
    (data / RECORD).write_text(content)
    (data / TENSORS).write_bytes(b"nothing")
    with refuses(ConfigurationError, says="is damaged"):
        read_vocabulary(data, manifest)
