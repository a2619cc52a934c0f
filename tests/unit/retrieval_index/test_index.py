"""The retrieval index: corpora of all kinds, the filter, the trie, resumed builds, damage."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from retrieval_index import ngram_trie
from retrieval_index.builder import HISTOGRAM, BuildConfig, build_index
from retrieval_index.corpus import read_corpus
from retrieval_index.index import open_index
from retrieval_index.keeping import kept_documents, limit_for
from retrieval_index.manifest import FILE, Manifest, read_manifest, trie_files, verify
from retrieval_index.ngram_trie import NgramTrie
from services.model_files.folder import tokenizer_digest
from speculation import successor_table as successors
from speculation.errors import ConfigurationError
from speculation.messages import RetrievalQuery, Retrieved
from tests.drafters.indexes import TARGET, ByteScorer, build, document, encode
from tests.running.refusals import refuses


def ask(folder: Path, text: str, most: int = 16, length: int = 10) -> Retrieved:
    query = RetrievalQuery(suffix=tuple(encode(text)), max_continuations=most, max_length=length)
    return open_index(folder).look_up([query])[0]


def found(answer: Retrieved) -> dict[str, int]:
    return {bytes(hit.tokens).decode(): hit.count for hit in answer.continuations}


# --- corpora ------------------------------------------------------------------------------------------------------


def test_jsonl_text_and_folders_are_read_and_doubles_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"answer": "two", "question": "x"}\n{"text": "one"}\n')
    (tmp_path / "tree" / ".git").mkdir(parents=True)
    (tmp_path / "tree" / ".git" / "config").write_text("hidden")
    (tmp_path / "tree" / "b.py").write_text("three")
    (tmp_path / "tree" / "c.txt").write_text("two")
    (tmp_path / "tree" / "d.png").write_bytes(b"\x89PNG\0\xff")
    documents = read_corpus([tmp_path / "a.jsonl", tmp_path / "tree"])
    assert [each.text for each in documents] == ["one", "two", "three"]
    assert documents[1].origin.endswith("a.jsonl:3")
    (question,) = (
        read_corpus([tmp_path / "q.jsonl"], "question") if _write(tmp_path / "q.jsonl", '{"question": "x"}') else ()
    )
    assert question.text == "x"


def test_a_large_file_is_read_line_by_line(tmp_path: Path) -> None:
    # One such character makes Python's texts four times as long.
    line = json.dumps({"text": 10_000 * "word " + "\U0001f600"}, ensure_ascii=False)
    _write(tmp_path / "a.jsonl", 100 * (line + "\n"))
    tracemalloc.start()
    try:
        (only,) = read_corpus([tmp_path / "a.jsonl"])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert only.text.endswith("word \U0001f600")
    assert most < 40 * len(line)


def _write(path: Path, text: str) -> bool:
    path.write_text(text)
    return True


@pytest.mark.parametrize(
    ("name", "content", "refusal"),
    [
        ("missing.txt", None, ("--corpus", "missing.txt")),
        ("binary.txt", b"a\0b", ("--corpus", "binary.txt")),
        ("latin.txt", "\xe9".encode("latin-1"), ("--corpus", "latin.txt")),
        ("empty.txt", b" \n", ("--corpus", "empty.txt")),
        ("bad.jsonl", b'{"text": "x"}\n{', ("--corpus", "bad.jsonl:2")),
        ("fields.jsonl", b'{"title": "x"}', ("--corpus", "fields.jsonl:1")),
        ("list.jsonl", b"[1]", ("--corpus", "list.jsonl:1")),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, refusal: tuple[object, ...]) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refuses(ConfigurationError, *refusal) as error:
        read_corpus([tmp_path / name])
    assert str(tmp_path / name) in str(error.value)


# --- building and looking up --------------------------------------------------------------------------------------


def test_the_longest_known_ending_counts_and_frequent_branches_come_first(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcdX", "abcdY1", "abcdY2", "zzcdQ"])
    answer = ask(tmp_path / "i", "..abcd")
    assert answer.continuations[0].match_length == 4
    assert found(answer) == {"X": 1, "Y1": 1, "Y2": 1}
    assert bytes(answer.continuations[0].tokens).startswith(b"Y")
    assert found(ask(tmp_path / "i", "..abcd", length=1)) == {"Y": 2, "X": 1}
    # Only two tokens of this ending are known.
    assert ask(tmp_path / "i", "//cd").continuations[0].match_length == 2
    assert "Q" in found(ask(tmp_path / "i", "//cd"))
    assert ask(tmp_path / "i", "nothing").continuations == ()
    assert len(ask(tmp_path / "i", "abcd", most=1).continuations) == 1
    assert ask(tmp_path / "i", "").continuations == ()
    assert ask(tmp_path / "i", "abcd").index_version == read_manifest(tmp_path / "i").version


def test_look_ups_agree_with_a_plain_search(tmp_path: Path) -> None:
    import random

    numbers = random.Random(5)
    texts = ["".join(numbers.choice("abc") for _ in range(numbers.randint(3, 60))) for _ in range(20)]
    build(tmp_path / "i", texts)
    index = open_index(tmp_path / "i")
    for _ in range(200):
        query = "".join(numbers.choice("abc") for _ in range(5))
        (answer,) = index.look_up([RetrievalQuery(suffix=tuple(encode(query)), max_continuations=500, max_length=2)])
        for length in range(4, 1, -1):
            ending = query[-length:]
            counts: dict[str, int] = {}
            for text in set(texts):
                for at in range(len(text) - length):
                    # Keys of two tokens and less are left out at a document's end.
                    if text[at : at + length] == ending and len(text) - at > 2:
                        rest = text[at + length : min(at + 8, at + length + 2)]
                        counts[rest] = counts.get(rest, 0) + 1
            if counts:
                break
        assert found(answer) == counts


def test_the_filter_keeps_what_the_target_finds_likely(tmp_path: Path) -> None:
    texts = ["aaaaaaaaaa", "abababababab", "abcdefghijklmnop"]
    manifest = build(tmp_path / "i", texts, keep=0.34, histogram=True)
    assert (manifest.documents, manifest.kept) == (3, 2)
    assert manifest.perplexity_limit == pytest.approx(2.0)
    assert ask(tmp_path / "i", "abcd").continuations == ()
    assert found(ask(tmp_path / "i", "aa"))
    assert (tmp_path / "i" / HISTOGRAM).stat().st_size > 1000
    assert limit_for([3.0, 1.0, 2.0], 0.01) == 1.0


def test_a_share_is_of_documents_of_tokens_or_of_each_length() -> None:
    # The likely ones are short; of the long ones one is likelier than the other.
    perplexities, lengths = [1.0, 2.0, 3.0, 9.0, 8.0], [10, 9, 8, 100, 120]
    assert kept_documents(perplexities, lengths, 0.4, "documents") == [True, True, False, False, False]
    # 27 tokens are too few of 247, and the next document has more than half of them.
    assert kept_documents(perplexities, lengths, 0.4, "tokens") == [True, True, True, False, True]
    assert kept_documents(perplexities, lengths, 27 / 247, "tokens") == [True, True, True, False, False]
    assert kept_documents(perplexities, lengths, 0.4, "length") == [True, True, False, False, True]
    # Equal ones stay together.
    assert kept_documents([1.0, 1.0, 1.0], [5, 5, 5], 0.1, "tokens") == [True, True, True]


def test_an_index_says_how_its_documents_were_kept(tmp_path: Path) -> None:
    texts = ["aaaaaaaaaa", "abababababab", "abcdefghijklmnop" * 3]
    usual = build(tmp_path / "documents", texts, keep=0.6)
    assert "keep_by" not in usual.to_json() and "whole_documents" not in usual.to_json()
    assert (usual.kept, usual.filter) == (2, "perplexity up to 2.0")
    by_tokens = build(tmp_path / "tokens", texts, keep=0.6, keep_by="tokens")
    assert (by_tokens.kept, by_tokens.filter) == (3, "perplexity up to 16.0, by tokens")
    by_length = build(tmp_path / "length", texts, keep=0.6, keep_by="length", score_tokens=None)
    assert (by_length.kept, by_length.filter) == (3, "perplexity of whole documents up to 16.0, by length")
    assert read_manifest(tmp_path / "length") == by_length
    assert build(tmp_path / "all", texts, keep_by="tokens").filter == "all"
    for wrong in ({"keep_by": "taste"}, {"whole_documents": "yes"}):
        with refuses(ConfigurationError, field="x"):
            Manifest.from_json(json.dumps(json.loads(by_length.to_json()) | wrong), "x")


def test_whole_documents_are_scored_in_windows_that_the_target_can_read(tmp_path: Path) -> None:
    short, scorer = replace(TARGET, context=8), ByteScorer()
    text = "aaaaaaaaaaaaaaabcdefgh"
    build(tmp_path / "i", [text, "zz"], score_tokens=None, scorer=scorer, target=short)
    # Each part begins with the last token of the one before: every token but the first is scored once.
    assert [bytes(part).decode() for part in scorer.scored] == ["zz", "aaaaaaaa", "aaaaaaaa", "abcdefgh"]
    # The mean over all tokens: fourteen of which nothing else was likely, and seven among eight letters.
    scored = json.loads((tmp_path / "i" / "scores" / "scores.jsonl").read_text().splitlines()[1])
    assert scored["perplexity"] == pytest.approx(8 ** (1 / 3)) and scored["rows"] == len(text) - 1
    known = successors.read(tmp_path / "i" / successors.FILE)
    assert known.after(ord("g")) == [ord("h"), ord("i")]


def test_the_snapshot_holds_what_was_likely(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcabc"])
    known = successors.read(tmp_path / "i" / successors.FILE)
    assert known.after(ord("a")) == [ord("b"), ord("c")]
    assert known.after(ord("z")) == []


def test_an_interrupted_build_goes_on(tmp_path: Path) -> None:
    texts = [f"text number {number} " * 3 for number in range(200)]

    class Interrupted(ByteScorer):
        @override
        def score(self, documents: object) -> object:  # type: ignore[override]
            if len(self.scored) > 60:
                raise KeyboardInterrupt
            return super().score(documents)  # type: ignore[arg-type]

    first = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "i", texts, scorer=first)
    assert not (tmp_path / "i" / FILE).exists()
    # A crash in the middle of a write leaves half a line.
    with (tmp_path / "i" / "scores" / "scores.jsonl").open("a") as file:
        file.write('{"digest": "0000')
    second = ByteScorer()
    resumed = build(tmp_path / "i", texts, scorer=second)
    assert len(first.scored) + len(second.scored) == len(texts)
    assert resumed.version == build(tmp_path / "whole", texts).version
    assert not (tmp_path / "i" / "building").exists()


def test_another_share_needs_no_new_scores(tmp_path: Path) -> None:
    build(tmp_path / "i", ["aaaaaaaaaa", "abcdefghijklmnop"])
    scorer = ByteScorer()
    assert build(tmp_path / "i", ["aaaaaaaaaa", "abcdefghijklmnop"], keep=0.5, scorer=scorer).kept == 1
    assert not scorer.scored


def test_scores_of_another_model_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "i" / "scores").mkdir(parents=True)
    (tmp_path / "i" / "scores" / "scores.jsonl").write_text(
        json.dumps({"key": "another", "digest": document("aaaa").digest, "perplexity": 1.0, "rows": 0}) + "\n"
    )
    scorer = ByteScorer()
    build(tmp_path / "i", ["aaaa"], scorer=scorer, target=replace(TARGET, name="other"))
    assert scorer.scored


def test_folders_with_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with refuses(ConfigurationError, field="--out", says="holds other things"):
        build(tmp_path, ["aaaa"])
    with refuses(ConfigurationError, field="--out", value="precious"):
        build(tmp_path / "precious", ["aaaa"])
    assert (tmp_path / "precious").read_text() == "x"


def test_nothing_left_is_said(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--keep"):
        build_index([document("ab")], TARGET, encode, ByteScorer, tmp_path / "i", BuildConfig())


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 0.0), ("keep", 1.5), ("depth", 1), ("score_tokens", 0), ("keep_by", "taste")]
)
def test_bad_build_settings_are_refused(name: str, value: object) -> None:
    with refuses(ConfigurationError, f"--{name.replace('_', '-')}", value):
        BuildConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_large_corpus_has_several_tries_that_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefg", weights=[30, 9, 8, 5, 3, 2, 1], k=draw.randrange(1, 90))) for _ in range(40)]
    one = build(tmp_path / "one", texts)
    monkeypatch.setattr(ngram_trie, "_SHARD", 200)
    several = build(tmp_path / "several", texts)
    assert one.shards == (0,)
    assert len(several.shards) > 4
    assert several == read_manifest(tmp_path / "several")
    assert (one.tokens, one.version == several.version) == (several.tokens, False)
    assert "shards" not in one.to_json(), "an index of one trie has the version that it always had"
    for _ in range(300):
        text = "".join(draw.choices("abcdefgh", weights=[30, 9, 8, 5, 3, 2, 1, 1], k=draw.randrange(1, 9)))
        left, right = found(ask(tmp_path / "one", text, 999)), found(ask(tmp_path / "several", text, 999))
        assert left == right
    # A smaller one in its place leaves nothing of it.
    monkeypatch.undo()
    build(tmp_path / "several", texts)
    assert sorted(file.name for file in (tmp_path / "several").iterdir() if "-" in file.name) == []
    # The next trie begins where one token has more than a trie should.
    keys, shards = ngram_trie.build([np.array([5] * 30 + [7, 7, 9, 9], dtype=np.uint32)], 4, tmp_path, shard=3)
    assert (len(NgramTrie(tmp_path, 4, shards)), shards) == (keys, (0, 7))


@pytest.mark.parametrize("shard", [None, 50])
def test_every_key_is_counted_once_whatever_its_bytes(tmp_path: Path, shard: int | None) -> None:
    # Bytes of 0 and 255 at many places of a token; documents shorter than a key.
    tokens = (0, 1, 255, 256, 0xFF00, 0xFFFF, 0x10000, 0x100FF, 0x1FFFF)
    source = random.Random(1)
    texts = [source.choices(tokens[: source.randint(1, 9)], k=source.randint(0, 30)) for _ in range(60)]
    expected = Counter(
        np.array(text[start : start + 4], dtype=">u4").tobytes() for text in texts for start in range(len(text) - 2)
    )
    keys, shards = ngram_trie.build([np.array(text, dtype=np.uint32) for text in texts], 4, tmp_path, shard=shard)
    tries = NgramTrie(tmp_path, 4, shards)
    found = {key: int(part.counts[part.trie.key_id(key)]) for part in tries._parts for key in part.trie}
    assert found == expected
    assert keys == len(expected) > 500
    assert (len(shards) > 1) == (shard is not None)
    assert {file.name for file in tmp_path.iterdir()} == {name for n in range(len(shards)) for name in trie_files(n)}


@pytest.mark.parametrize("shards", [[], [1], [0, 0], [0, 9, 3], [0, 1.5], ["a"], 7, list(range(2000)), [0, 5]])
def test_tries_that_are_none_are_refused(tmp_path: Path, shards: object) -> None:
    manifest = json.loads(build(tmp_path, ["abcdabcd"]).to_json())
    with refuses(ConfigurationError, field="x"):
        Manifest.from_json(json.dumps(manifest | {"shards": shards}), "x")


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "how"), [(p, h) for p in (*trie_files(0), successors.FILE) for h in ("cut", "flip", "gone")]
)
def test_damaged_parts_are_refused(tmp_path: Path, part: str, how: str) -> None:
    build(tmp_path, ["abcdabcd"]) if not any(tmp_path.iterdir()) else None
    file = tmp_path / part
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    {"cut": lambda: file.write_bytes(content[:-1]), "flip": lambda: file.write_bytes(content), "gone": file.unlink}[how]()
    with refuses(ConfigurationError, tmp_path if how == "gone" else file, says=part):
        open_index(tmp_path)


def test_what_another_corpus_left_is_not_in_the_snapshot(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcabc", "xyzxyz"])
    again = build(tmp_path / "i", ["abcabc"])
    assert successors.read(tmp_path / "i" / successors.FILE).after(ord("x")) == []
    assert again.version == build(tmp_path / "fresh", ["abcabc"]).version


def test_odd_jsonl_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two"}\n{"text": "half \\ud83d"}\n', encoding="utf-8")
    assert [each.text for each in read_corpus([tmp_path / "a.jsonl"])] == ["one\u2028two", "half ?"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", "16"), ("depth", 1.5), ("depth", 1e999), ("depth", 3), ("tokens", -1), ("vocab_size", None)],
)
def test_counts_that_are_none_are_refused(tmp_path: Path, field: str, value: object) -> None:
    manifest = json.loads(build(tmp_path, ["abcdabcd"]).to_json())
    with refuses(ConfigurationError, field="x"):
        Manifest.from_json(json.dumps(manifest | {field: value}), "x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "parts": {}}'])
def test_foreign_manifests_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with refuses(ConfigurationError, field="manifest.json"):
        open_index(tmp_path)


def test_a_part_cannot_lie_elsewhere(tmp_path: Path) -> None:
    manifest = json.loads(build(tmp_path, ["abcdabcd"]).to_json())
    manifest["parts"]["../../etc/passwd"] = {"sha256": "0", "size": 1}
    with refuses(ConfigurationError, field="x"):
        Manifest.from_json(json.dumps(manifest), "x")


def test_an_index_for_another_tokenizer_is_refused(tmp_path: Path) -> None:
    build(tmp_path, ["abcdabcd"])
    open_index(tmp_path, TARGET.tokenizer_sha256)
    with refuses(ConfigurationError, says="built for the tokenizer of tiny"):
        open_index(tmp_path, "b" * 64)
    verify(tmp_path, read_manifest(tmp_path))
    with refuses(ConfigurationError, field="none"):
        read_manifest(tmp_path / "none")


def test_a_tokenizers_digest_is_about_its_tokens(tmp_path: Path) -> None:
    def digest(content: dict[str, object]) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tokenizer_digest(tmp_path)

    same = digest({"model": 1, "padding": None})
    assert digest({"padding": {"length": 3}, "model": 1}) == same
    assert digest({"model": 2}) != same
    (tmp_path / "tokenizer.json").unlink()
    with refuses(ConfigurationError, says="tokenizer.json"):
        tokenizer_digest(tmp_path)
