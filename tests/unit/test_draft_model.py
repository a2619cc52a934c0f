"""The draft model: what it drafts equals what plain passes of it give, whatever was rolled back, batched or cut off before."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from services.drafter.config import DrafterConfig, StopConfig, TrainedConfig
from services.drafter.draft_model.draft_model_source import DraftModelSource, make
from services.drafter.draft_model.lm_session import LmSession
from services.drafter.draft_model.vocabulary_map import map_vocabularies
from services.drafter.interfaces import DraftWanted
from services.drafter.known_states import KnownStates
from services.drafter.stopping.interface import DraftedToken
from services.drafter.stopping.lengths import PlannedLength
from services.verifier.choosing.processors import build_truncation
from speculation.choose import choose
from speculation.errors import ConfigurationError
from speculation.messages import DraftNoise, OpenSession, StepReport
from speculation.tree import ROOT, children, validate
from speculation.types import SamplingParams, TokenTree
from tests.draft_models import draft_beside
from tests.tiny import make_tiny_model

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 40, 41, 42]
VOCAB = 320


def config(target: Path, draft: Path, **trained: object) -> DrafterConfig:
    return DrafterConfig(trained=TrainedConfig(checkpoints={"draft_model": draft}, target=target, **trained))  # type: ignore[arg-type]


def source_of(target: Path, draft: Path | None = None, *, length: int = 4, **trained: object) -> DraftModelSource:
    return make(config(target, draft or target, **{"stop": StopConfig(num_assistant_tokens=length), **trained}))


def opened(source: DraftModelSource, tokens: Sequence[int], prompt_length: int = 0, **message: object) -> LmSession:
    asked = OpenSession(
        session_id="s",
        tokens=tuple(tokens),
        prompt_length=prompt_length or len(tokens),
        sources=("draft_model",),
        max_nodes=64,
        **message,  # type: ignore[arg-type]
    )
    return source.open(asked)


def wanted(session: LmSession, max_nodes: int = 8, least: float = 0.0) -> DraftWanted:
    return DraftWanted(session=session, max_nodes=max_nodes, min_probability=least, states=KnownStates())


def commit(session: LmSession, tokens: Sequence[int]) -> None:
    session.observe(
        StepReport(
            session_id="s",
            committed=tuple(tokens),
            length=len(session.tokens) + len(tokens),
            prefix_hash=0,
            accepted_path=(),
            max_nodes=8,
        )
    )


class Target:
    """A model's own choices, by plain passes over the whole text."""

    def __init__(self, folder: Path, **sampling: object) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})  # type: ignore[arg-type]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return found

    def choices(self, tokens: Sequence[int]) -> list[int]:
        """Its choice after each of the tokens."""
        truncation = build_truncation(self.params)
        found = []
        for position, row in enumerate(self.logits(tokens), 1):
            if self.params.temperature > 0:
                row = row / self.params.temperature
                row = row if truncation is None else truncation(row, ())
            found.append(choose(row, self.params, self.params.seed, position))
        return found

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(self.choices(text)[-1])
        return text[len(tokens) :]


def chain_of(tree: TokenTree) -> list[int]:
    """The path of first children, which are the likeliest."""
    below, node, found = children(tree), ROOT, []
    while node in below:
        node = below[node][0]
        found.append(tree.tokens[node])
    return found


def same(left: TokenTree, right: TokenTree) -> bool:
    return (left.tokens, left.parents) == (right.tokens, right.parents) and left.scores == pytest.approx(
        right.scores, rel=1e-3
    )


SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "seed": 9, "min_p": 0.02},
]


def told(sampling: dict[str, object]) -> dict[str, object]:
    """What a trusted drafter is told of it."""
    if not sampling:
        return {}
    given = {name: value for name, value in sampling.items() if name != "temperature"}
    return {"temperature": sampling["temperature"], "noise": DraftNoise(**given)}  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("branches", [1, None, 3])
def test_the_target_as_its_own_draft_model_is_always_right(
    tiny_model: Path, sampling: dict[str, object], branches: int | None
) -> None:
    """Over 100 steps that accept all, or part, or nothing: every token of every chain is what the target chooses there."""
    source = source_of(tiny_model, length=3, eagle_topk=branches)
    chance = random.Random(5)
    session = opened(source, PROMPT, **told(sampling))
    drafted: list[tuple[int, list[int]]] = []
    nodes = 0
    for _ in range(110):
        (tree,) = source.draft([wanted(session, 40)])
        chain = chain_of(tree)
        assert len(chain) == 3
        nodes += len(tree)
        drafted.append((len(session.tokens), chain))
        # Whole chains with the next token or without, as when a draft comes late; else a part, and another token behind it.
        kept = chain[: chance.choice((3, 3, 2, 0))]
        commit(session, [*kept, chance.randrange(VOCAB)] if chance.random() < 0.7 or not kept else kept)
    assert nodes == 330 if branches == 1 else nodes > 600
    target = Target(tiny_model, **sampling)
    choices = target.choices(session.tokens)
    right = 0
    for start, chain in drafted:
        for depth, token in enumerate(chain):
            if chain[:depth] != session.tokens[start : start + depth]:
                break
            assert token == choices[start + depth - 1], (start, depth)
            right += 1
    assert right > 250


@pytest.mark.parametrize("branches", [1, None, 3])
def test_rolled_back_is_as_good_as_new(tiny_model: Path, branches: int | None) -> None:
    """Whatever path of a tree is accepted: a new session drafts the same."""
    source, other = source_of(tiny_model, eagle_topk=branches), source_of(tiny_model, eagle_topk=branches)
    chance = random.Random(3)
    session, paths = opened(source, PROMPT), set()
    for _ in range(40):
        (tree,) = source.draft([wanted(session, 16)])
        (new,) = other.draft([wanted(opened(other, session.tokens, len(PROMPT)), 16)])
        assert same(tree, new)
        node, path = chance.randrange(-1, len(tree)), []
        while node != ROOT:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        paths.add(len(path))
        bonus = [chance.randrange(VOCAB)] if chance.random() < 0.7 or not path else []
        commit(session, [*reversed(path), *bonus])
    assert len(paths) >= 4


def test_a_batch_is_what_each_one_gets_alone(tiny_model: Path) -> None:
    draft = draft_beside(tiny_model)
    together, alone = source_of(tiny_model, draft), source_of(tiny_model, draft)
    prompts = [PROMPT[:length] for length in (1, 4, 11)] + [[40, 41, 42] * 30, [100 + i for i in range(64)]]
    one, two = ([opened(source, prompt) for prompt in prompts] for source in (together, alone))
    for step in range(6):
        trees = together.draft([wanted(session, 10) for session in one])
        for tree, session in zip(trees, two, strict=True):
            (own,) = alone.draft([wanted(session, 10)])
            assert same(tree, own)
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            # Some sessions are behind others by a step.
            if (step + index) % 3:
                said = [*chain_of(trees[index])[: (step + index) % 5], 17]
                commit(left, said)
                commit(right, said)


def test_long_texts_are_read_in_parts_while_others_draft(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    longer = [3 + i % 300 for i in range(450)]
    slow, quick = opened(source, longer), opened(source, PROMPT)
    calls = 0
    while True:
        late, early = source.draft([wanted(slow), wanted(quick)])
        assert len(early) == 8
        calls += 1
        if late is not None:
            break
    assert calls == 2
    (alone,) = source.draft([wanted(opened(source, longer))])
    assert same(late, alone)


@pytest.mark.parametrize("window", [64, 2048])
def test_a_text_longer_than_the_window_is_drafted_for_from_its_end(tiny_model: Path, window: int) -> None:
    """2048 is more than the model's 512 positions, which then are the limit."""
    source = source_of(tiny_model, window=window)
    longest = min(window, 512)
    target = Target(tiny_model)
    session = opened(source, [3 + i % 300 for i in range(longest + 40)])
    for _ in range(20):
        (tree,) = source.draft([wanted(session, 4)])
        assert 0 < len(tree) <= 4
        assert longest // 2 - 4 <= session.cache.text and len(session.cache) <= longest
        # Exactly what the model says of the end of the text that the cache holds.
        assert tree.tokens[0] == target.choices(session.tokens[-session.cache.text :])[-1]
        commit(session, [tree.tokens[0], 17])


@dataclass
class Recorder(PlannedLength):
    """A policy that notes what it is told."""

    length: int = 5
    until: int = 99
    begun: list[int] = field(default_factory=list)
    tokens: list[DraftedToken] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    reads_distribution = True

    def open(self, message: OpenSession) -> Recorder:
        return self

    def begin(self, position: int) -> int:
        self.begun.append(position)
        return self.length

    def more(self, drafted: DraftedToken) -> bool:
        self.tokens.append(drafted)
        return drafted.step + 1 < self.until

    def observe(self, drafted: int, accepted: int) -> None:
        self.outcomes.append((drafted, accepted))


def with_policy(source: DraftModelSource, policy: Recorder, monkeypatch: pytest.MonkeyPatch) -> DraftModelSource:
    monkeypatch.setattr(source, "_stop", policy)
    return source


def test_the_policy_decides_how_long_a_chain_gets(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Recorder(until=3)
    source = with_policy(source_of(tiny_model, eagle_topk=1), policy, monkeypatch)
    answer = Target(tiny_model).answer(PROMPT, 4)
    session = opened(source, [*PROMPT, answer[0]], len(PROMPT))
    (tree,) = source.draft([wanted(session)])
    assert list(tree.tokens) == answer[1:4]
    assert policy.begun == [1]
    assert [(each.token, each.step, each.position) for each in policy.tokens] == [
        (answer[1], 0, 1), (answer[2], 1, 2), (answer[3], 2, 3),
    ]  # fmt: skip
    path = 1.0
    for each, score in zip(policy.tokens, tree.scores, strict=True):
        path *= each.probability
        assert each.path_probability == pytest.approx(path) == pytest.approx(score)
        assert len(each.top) == 10 and each.top[0] == pytest.approx(each.probability)
        assert sorted(each.top, reverse=True) == list(each.top) and 0 < each.entropy < np.log(VOCAB)
    policy.length = 0
    assert source.draft([wanted(session)]) == [TokenTree()]
    policy.length = 2
    assert [len(tree) for tree in source.draft([wanted(session)])] == [2]
    assert [len(tree) for tree in source.draft([wanted(session, 1)])] == [1]


def test_the_policy_learns_what_the_text_says(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Recorder(length=4)
    source = with_policy(source_of(tiny_model, eagle_topk=1), policy, monkeypatch)
    answer = Target(tiny_model).answer(PROMPT, 8)
    session = opened(source, PROMPT)
    source.draft([wanted(session)])
    commit(session, answer[:5])
    assert policy.outcomes == [(4, 4)]
    source.draft([wanted(session)])
    commit(session, [answer[5], answer[6], (answer[7] + 1) % VOCAB])
    assert policy.outcomes[1:] == [(4, 2)]
    # A step that decides about two tokens only, then one about the rest.
    (tree,) = source.draft([wanted(session)])
    commit(session, tree.tokens[:2])
    assert len(policy.outcomes) == 2
    commit(session, [tree.tokens[2], (tree.tokens[3] + 1) % VOCAB])
    assert policy.outcomes[2:] == [(4, 3)]
    # Two tokens are judged, and then there is another draft.
    (tree,) = source.draft([wanted(session)])
    commit(session, tree.tokens[:2])
    source.draft([wanted(session)])
    assert policy.outcomes[3:] == [(2, 2)]


def test_unlikely_nodes_are_not_drafted(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (whole,) = source.draft([wanted(session, 20)])
    assert list(whole.scores) != sorted(whole.scores)
    # A later pass over the same tokens may differ in the last digits.
    least = 0.9999 * sorted(whole.scores)[len(whole) // 2]
    (part,) = source.draft([wanted(session, 20, least)])
    kept = [node for node in range(len(whole)) if whole.scores[node] >= least]
    assert [part.tokens[node] for node in range(len(part))] == [whole.tokens[node] for node in kept]
    assert source.draft([wanted(session, 20, 1.0)]) == [TokenTree()]


def test_the_likeliest_nodes_fill_a_tree(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (large,), (small,) = source.draft([wanted(session, 16)]), source.draft([wanted(session, 5)])
    validate(large, vocab_size=VOCAB, max_nodes=16)
    assert sorted(small.scores) == pytest.approx(sorted(large.scores)[-5:], rel=1e-4)


def test_sampled_chains_carry_the_distribution_they_were_drawn_from(tiny_model: Path) -> None:
    source = source_of(tiny_model, length=3)
    target = Target(tiny_model)
    drawn = set()
    for _ in range(20):
        session = opened(source, PROMPT, temperature=0.8, sampled=True)
        # The length depends on nothing that was drawn, not even where paths are unlikely.
        (tree,) = source.draft([wanted(session, 8, 0.9)])
        validate(tree, vocab_size=VOCAB, max_nodes=8)
        assert tree.parents == (-1, 0, 1) and len(tree.proposals) == 3
        drawn.add(tree.tokens)
        text, path = list(PROMPT), 1.0
        for token, proposal, score in zip(tree.tokens, tree.proposals, tree.scores, strict=True):
            q = torch.softmax(target.logits(text)[-1].double() / 0.8, -1)
            q = q[list(proposal.token_ids)]
            assert list(proposal.probabilities) == pytest.approx((q / q.sum()).tolist(), abs=1e-4)
            assert 1 < len(proposal.token_ids) <= 256
            path *= proposal.probabilities[proposal.token_ids.index(token)]
            assert score == pytest.approx(path)
            text.append(token)
    assert len(drawn) > 5
    (greedy,) = source.draft([wanted(opened(source, PROMPT, sampled=True))])
    assert not greedy.proposals


def test_without_noise_a_sampled_request_gets_the_likeliest(tiny_model: Path) -> None:
    source = source_of(tiny_model, eagle_topk=1)
    (cold,) = source.draft([wanted(opened(source, PROMPT))])
    (warm,) = source.draft([wanted(opened(source, PROMPT, temperature=2.0))])
    assert cold.tokens == warm.tokens and cold.scores[0] > warm.scores[0]


def test_memory_is_bounded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tiny_model)
    sessions = [opened(source, PROMPT) for _ in range(5)]
    (first,) = source.draft([wanted(sessions[0])])
    monkeypatch.setattr(source._room, "most_bytes", 3 * sessions[0].cache.nbytes)
    for session in sessions:
        assert same(source.draft([wanted(session)])[0], first)
    assert [bool(session.cache.nbytes) for session in sessions] == [False, False, True, True, True]
    # What was forgotten is computed once more.
    assert same(source.draft([wanted(sessions[0])])[0], first)
    sessions[0].close()
    assert not sessions[0].cache.nbytes


def test_after_a_pass_that_failed_drafts_are_right_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (tree,) = source.draft([wanted(session)])
    commit(session, chain_of(tree)[:2])
    own, calls = source._lm.logits, 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("planted failure")
        return own(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(source._lm, "logits", failing)
        with pytest.raises(RuntimeError, match="planted"):
            source.draft([wanted(session)])
    (again,) = source.draft([wanted(session)])
    (fresh,) = source.draft([wanted(opened(source, session.tokens, len(PROMPT)))])
    assert same(again, fresh)


# --- other architectures, types, vocabularies ----------------------------------------------------------------------


def test_sliding_windows_are_the_models_own(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB,
            num_key_value_heads=2,
            sliding_window=16,
            max_position_embeddings=256,
            initializer_range=0.4,
            **sizes,
        )
    )
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "m")
    source = source_of(tiny_model, tmp_path / "m", eagle_topk=1)
    session, drafted = opened(source, PROMPT * 5), []
    for _ in range(12):
        (tree,) = source.draft([wanted(session, 4)])
        drafted.append((len(session.tokens), chain_of(tree)))
        commit(session, [*chain_of(tree)[:2], 17])
    choices = Target(tmp_path / "m").choices(session.tokens)
    for start, chain in drafted:
        assert chain[:2] == choices[start - 1 : start + 1]


def test_half_precision_drafts(tiny_model: Path) -> None:
    source = source_of(tiny_model, dtype="bfloat16")
    session = opened(source, PROMPT)
    for _ in range(30):
        (tree,) = source.draft([wanted(session, 4)])
        commit(session, tree.tokens[:1])
    choices = Target(tiny_model).choices(session.tokens)
    assert (
        sum(left == right for left, right in zip(choices[len(PROMPT) - 1 :], session.tokens[len(PROMPT) :], strict=False))
        > 20
    )


def test_only_listed_tokens_are_drafted(tiny_model: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_model, tmp_path / "draft"))
    kept = torch.tensor([token for token in range(VOCAB) if token % 3 == 1 and token < 300])
    save_file(
        {"d2t": kept - torch.arange(len(kept)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)},
        draft / "vocabulary.safetensors",
    )
    source = source_of(tiny_model, draft)
    (tree,) = source.draft([wanted(opened(source, PROMPT), 12)])
    assert len(tree) == 12 and all(token % 3 == 1 for token in tree.tokens)
    q = torch.softmax(Target(tiny_model).logits(PROMPT)[-1][kept], -1)
    assert tree.tokens[0] == int(kept[q.argmax()]) and max(tree.scores) == pytest.approx(float(q.max()), rel=1e-4)


def write_words(folder: Path, words: Sequence[str], special: str = "<|end|>") -> None:
    """A word-level tokeniser, sentencepiece's way of marking spaces."""
    vocab = {word: index for index, word in enumerate([special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=special))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """A target on words and a draft model with some of them, at other ids, and others."""
    shared = [f"▁w{n}" for n in range(30)]
    folders = []
    for name, words in (
        ("target", [*shared, "▁only", *(f"▁t{n}" for n in range(8))]),
        ("draft", [*(f"▁d{n}" for n in range(9)), *reversed(shared), "▁", "▁on", "ly"]),
    ):
        folder = make_tiny_model(tmp_path / name, vocab_size=len(words) + 1, eos_token_id=0)
        write_words(folder, words)
        folders.append(folder)
    return folders[0], folders[1]


def test_equal_tokens_of_two_tokenisers_stand_for_each_other(foreign: tuple[Path, Path]) -> None:
    target, draft = foreign
    found = map_vocabularies(draft, target)
    assert found.kept is not None and found.targets is not None
    assert len(found.kept) == 31
    own, wanted_ids = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (draft, target))
    for each, token in zip(found.kept.tolist(), found.targets.tolist(), strict=True):
        assert own.id_to_token(each) == wanted_ids.id_to_token(token)
        assert found.encode([token]) == [each]
    # A word of the target alone is left to the draft model's own spelling.
    assert all(each < 43 for each in found.encode([31]))


def test_a_draft_model_with_another_tokeniser_drafts_the_targets_tokens(foreign: tuple[Path, Path]) -> None:
    target, draft = foreign
    source = source_of(target, draft)
    found = map_vocabularies(draft, target)
    assert found.targets is not None and found.kept is not None
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    session = opened(source, [3, 4, 5, 31, 6])
    for _ in range(12):
        (tree,) = source.draft([wanted(session, 6)])
        with torch.inference_mode():
            row = model(torch.tensor([found.encode(session.tokens)])).logits[0, -1][found.kept]
        assert tree.tokens[0] == found.targets[int(row.argmax())]
        assert set(tree.tokens) <= set(found.targets.tolist())
        assert max(tree.scores) == pytest.approx(float(torch.softmax(row, -1).max()), rel=1e-3)
        commit(session, [*tree.tokens[:1], 33])


def test_a_tokeniser_on_bytes_and_one_on_characters_share_tokens(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "d", vocab_size=9)
    write_words(draft, ["▁t", "a", "ö", "▁", "<0xE2>", "the", "zzzz"])
    found = map_vocabularies(draft, tiny_model)
    assert found.kept is not None and found.targets is not None
    target = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    pairs = dict(zip(found.kept.tolist(), found.targets.tolist(), strict=True))
    assert target.decode([pairs[2]]) == "a" and target.decode([pairs[4]]) == " "
    assert target.id_to_token(pairs[5]) == "â"
    assert target.id_to_token(pairs[0]) == "<|end|>"
    assert 7 not in pairs


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(target: Path | None, draft: Path, **trained: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make(DrafterConfig(trained=TrainedConfig(checkpoints={"draft_model": draft}, target=target, **trained)))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(target: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(target, folder))
    change(copy)
    return copy


def test_folders_that_hold_no_draft_model_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"drafter\.models names no weights of draft_model"):
        make(DrafterConfig())
    assert "trained.target is None" in refused(None, tiny_model)
    assert "must be a folder" in refused(tiny_model, tmp_path / "absent")

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert "pytorch_model.bin is a pickle" in refused(tiny_model, changed(tiny_model, tmp_path / "a", pickled))
    empty = changed(tiny_model, tmp_path / "b", lambda folder: (folder / "model.safetensors").unlink())
    assert "no *.safetensors" in refused(tiny_model, empty)
    (empty / "blocks.safetensors").touch()
    assert "GGUF blocks" in refused(tiny_model, empty)
    without = changed(tiny_model, tmp_path / "c", lambda folder: (folder / "config.json").unlink())
    assert "config.json cannot be read" in refused(tiny_model, without)
    without = changed(tiny_model, tmp_path / "d", lambda folder: (folder / "tokenizer.json").unlink())
    assert "holds no tokenizer.json" in refused(tiny_model, without)
    assert "dtype" in refused(tiny_model, tiny_model, dtype="int8")
    assert "the device nowhere" in refused(tiny_model, tiny_model, device="nowhere")


def test_damaged_draft_models_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            found = load_file(folder / "model.safetensors")
            change(found)
            save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

        return apply

    name = "model.layers.0.mlp.up_proj.weight"

    def edited(case: str, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        return refused(tiny_model, changed(tiny_model, tmp_path / case, weights(change)))

    assert f"hold no {name}" in edited("missing", lambda found: found.pop(name))
    assert "another shape" in edited("shape", lambda found: found.update({name: torch.zeros(3, 3)}))
    assert "has no place" in edited("extra", lambda found: found.update({"model.layers.9.x": torch.zeros(1)}))
    assert "infinite values or NaN" in edited("nan", lambda found: found[name].fill_(torch.nan))

    def other(folder: Path, **fields: object) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **fields}))

    copy = changed(tiny_model, tmp_path / "hidden", lambda folder: other(folder, hidden_size=32))
    assert "another shape" in refused(tiny_model, copy)
    copy = changed(tiny_model, tmp_path / "type", lambda folder: other(folder, model_type="no_such"))
    assert "no_such" in refused(tiny_model, copy)
    copy = changed(tiny_model, tmp_path / "cut", lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 9))
    assert "cannot load the draft model" in refused(tiny_model, copy)


def test_vocabularies_without_a_common_token_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "d", vocab_size=4)
    write_words(draft, ["▁xyzzy", "▁plugh", "▁plover"], special="<none>")
    assert "no token in common" in refused(tiny_model, draft)


def test_models_whose_state_cannot_be_rolled_back_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def recurrent(folder: Path) -> None:
        torch.manual_seed(0)
        (folder / "model.safetensors").unlink()
        MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.4)
        ).save_pretrained(folder)

    assert "cannot draft with the model" in refused(tiny_model, changed(tiny_model, tmp_path / "m", recurrent))


def test_a_stored_vocabulary_must_fit(tiny_model: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_model, tmp_path / "draft"))
    for ids in ([5, 4], [0, VOCAB]):
        offsets = torch.tensor(ids) - torch.arange(len(ids))
        save_file({"d2t": offsets}, draft / "vocabulary.safetensors")
        assert "d2t" in refused(tiny_model, draft)
