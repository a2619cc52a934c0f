"""Token by token the same text as all at once, for any tokens, and at a cost that does not grow with the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.router.detokenizer import Detokenizer
from services.router.named_templates import ChatTemplates
from services.router.tokenizer_file import FileTokenizer
from services.router.tokens import Tokens

NO_TEMPLATES = ChatTemplates({}, {})


class Counted:
    """A backend that counts the tokens it is given to decode."""

    def __init__(self, backend: FileTokenizer) -> None:
        self._backend = backend
        self.special_ids = backend.special_ids
        self.decoded = self.longest = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        self.longest = max(self.longest, len(tokens))
        return self._backend.decode(tokens)


def byte_level() -> Tokenizer:
    """GPT-2's kind: any bytes, of which tokens may hold parts of characters."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(alphabet), "Ġthe", "ĠçļĦ", "ðŁĻ", "Ċ"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    return with_special(made)


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: characters, and bytes for those that the vocabulary lacks."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)}
    for piece in ("a", "b", "▁", "▁c", "é", "�", "<unk>"):
        vocab[piece] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_special(made)


def word_pieces() -> Tokenizer:
    vocab = {piece: number for number, piece in enumerate(["[UNK]", "one", "##two", "three", "##x", ",", "."])}
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=False)
    return with_special(made)


def with_special(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


def deltas(backend: FileTokenizer | Counted, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(backend)  # type: ignore[arg-type]
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


def utf8(source: random.Random) -> list[int]:
    """Whole characters, spelt in bytes."""
    return [*source.choice("aé京🙂ÿ").encode()]


@pytest.mark.parametrize("make", [byte_level, word_pieces])
def test_any_tokens_are_the_text_of_all_of_them(make: Callable[[], Tokenizer]) -> None:
    made = make()
    backend, source = FileTokenizer(made, NO_TEMPLATES), random.Random(0)
    size = made.get_vocab_size()
    for _ in range(1500):
        ids = [source.randrange(size) for _ in range(source.randrange(60))]
        assert deltas(backend, ids) == backend.decode(ids)


def test_broken_bytes_one_after_the_other() -> None:
    backend, source = FileTokenizer(byte_level(), NO_TEMPLATES), random.Random(1)
    spelt = {character: number for character, number in byte_level().get_vocab().items() if len(character) == 1}
    # Beginnings of characters, ends of them, and what is neither.
    nasty = [spelt[character] for character in pre_tokenizers.ByteLevel.alphabet() if spelt[character] > 90]
    for _ in range(1500):
        ids = source.choices(nasty, k=source.randrange(50))
        assert deltas(backend, ids) == backend.decode(ids)


def test_characters_spelt_in_bytes_are_the_text_of_all_of_them() -> None:
    made = byte_fallback()
    backend, source = FileTokenizer(made, NO_TEMPLATES), random.Random(2)
    others = range(256, made.get_vocab_size())
    for _ in range(1500):
        parts = [utf8(source) if source.random() < 0.6 else [source.choice(others)] for _ in range(source.randrange(40))]
        ids = [token for part in parts for token in part]
        assert deltas(backend, ids) == backend.decode(ids), ids


def test_bytes_that_break_off_lose_nothing_else() -> None:
    """This kind of tokeniser replaces whole characters when a byte behind them is broken: too late where they were shown."""
    made = byte_fallback()
    backend, source = FileTokenizer(made, NO_TEMPLATES), random.Random(3)
    equal = 0
    for _ in range(3000):
        ids = [
            source.choice([source.randrange(256), 256, 257, 258, 259, *utf8(source)]) for _ in range(source.randrange(30))
        ]
        text, whole = deltas(backend, ids), backend.decode(ids)
        equal += text == whole
        for kept in "ab":
            assert text.count(kept) >= whole.count(kept), ids
        assert len(text) >= len(whole), ids
        # What differs was shown before it was known to be broken.
        shown = iter(text)
        assert all(character in shown for character in whole if character != "�"), ids
    assert equal > 1500
    # Never to be whole again, from the first byte on.
    for ids in ([255] * 500, [255, *"京".encode() * 100], [*"京".encode()[:2]] * 200):
        assert deltas(backend, ids) == backend.decode(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_pieces])
@pytest.mark.parametrize("what", ["special", "broken", "text", "characters", "long"])
def test_a_token_costs_the_same_wherever_it_comes(make: Callable[[], Tokenizer], what: str) -> None:
    made = make()
    backend = Counted(FileTokenizer(made, NO_TEMPLATES))
    spelt = {"broken": [255 if make is byte_fallback else 200], "characters": [*"京".encode()], "text": [1, 2, 3]}
    unit = {"special": [made.token_to_id("<s>")], "long": [made.token_to_id("<tool>")], **spelt}[what]
    ids = [token % made.get_vocab_size() for token in unit * (4000 // len(unit))]
    text = deltas(backend, ids)
    assert backend.longest <= 64
    assert backend.decoded <= 40 * len(ids)
    assert text == FileTokenizer(made, NO_TEMPLATES).decode(ids)


def test_special_tokens_between_the_bytes_of_a_character(tiny_model: Path) -> None:
    tokens = Tokens(str(tiny_model))
    detokenizer = tokens.detokenizer()
    first, *rest = tokens.encode("京")
    assert [detokenizer.push(token) for token in (first, 0, 0, *rest)][-1] == "京"


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_pieces])
@pytest.mark.parametrize("between", [1, 50])
def test_special_tokens_between_others_cost_nothing_and_change_nothing(make: Callable[[], Tokenizer], between: int) -> None:
    """They are no text: skipped ones do not widen what is decoded again with every token."""
    made = make()
    backend, plain = Counted(FileTokenizer(made, NO_TEMPLATES)), Counted(FileTokenizer(made, NO_TEMPLATES))
    others = [token % made.get_vocab_size() for token in [*"京".encode(), 1, 2, 3] * 60]
    special = made.token_to_id("</s>")
    text = deltas(backend, [each for token in others for each in (*[special] * between, token)])
    assert text == deltas(plain, others) == FileTokenizer(made, NO_TEMPLATES).decode(others)
    # Not one special token is decoded.
    assert (backend.decoded, backend.longest) == (plain.decoded, plain.longest)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_pieces])
def test_an_answer_continues_the_text_before_it(make: Callable[[], Tokenizer]) -> None:
    backend, source = FileTokenizer(make(), NO_TEMPLATES), random.Random(3)
    size = backend._tokenizer.get_vocab_size()
    for _ in range(300):
        ids = [source.randrange(size) for _ in range(source.randrange(2, 40))]
        whole = backend.decode(ids)
        if "\ufffd" in whole:
            continue
        cut = source.randrange(len(ids))
        before = backend.decode(ids[:cut]).rstrip("\ufffd")
        if not whole.startswith(before):
            continue
        detokenizer = Detokenizer(backend, after=ids[:cut])
        after = "".join(detokenizer.push(token) for token in ids[cut:]) + detokenizer.flush()
        assert before + after == whole, (ids, cut)


def test_the_first_space_of_a_continued_text() -> None:
    backend = FileTokenizer(byte_fallback(), NO_TEMPLATES)
    a, space_c = (backend._tokenizer.token_to_id(piece) for piece in ("a", "\u2581c"))
    begin = backend._tokenizer.token_to_id("<s>")
    assert [Detokenizer(backend, after=after).push(space_c) for after in ((), (begin,), (begin, a))] == ["c", "c", " c"]
