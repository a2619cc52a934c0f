"""Drafters of hidden states as sources: caches that are rolled back exactly, batches, trees, states that are missing, noise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.drawn_proposals import draw_with
from services.drafter.feature_draft.head import FeatureHead, HeadOutput, causal
from services.drafter.feature_draft.head_config import HeadConfig
from services.drafter.feature_draft.session import FeatureSession
from services.drafter.feature_draft.source import FeatureSource, TreeForm
from services.drafter.feature_draft.target_rows import TargetRows
from services.drafter.interfaces import DraftWanted
from services.drafter.known_states import KnownStates
from services.drafter.torch_threads import use_threads
from services.generation_config import ModelProcessors
from speculation.choose import choose
from speculation.messages import DraftNoise, OpenSession, StepReport
from speculation.tree import ROOT, depths, path_to, validate
from speculation.types import EMPTY_TREE, Features, SamplingParams, TokenTree

SIZE, VOCABULARY = 32, 60
EAGLE = HeadConfig(
    family="eagle",
    hidden_size=SIZE,
    target_hidden_size=SIZE,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    fc_bias=True,
)
FSPAD = replace(EAGLE, family="fspad", sampler=True, two_outputs=True)
EAGLE3 = replace(
    EAGLE, family="eagle3", state_layers=(0, 1, -1), fc_bias=False, output_norm=True, own_output=True, num_key_value_heads=4
)
HEADS = {"eagle": EAGLE, "fspad": FSPAD, "eagle3": EAGLE3}


def head(config: HeadConfig, ids: Sequence[int] | None = None) -> FeatureHead:
    torch.manual_seed(1)
    # In float64, so that rounding decides nothing.
    rows = TargetRows.of(torch.randn(config.vocab_size, config.target_hidden_size).double())
    if ids is not None:
        config = replace(config, draft_vocab_size=len(ids))
    made = FeatureHead(config, rows, None if ids is None else torch.tensor(ids))
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=1.5 if "lm_head" in name else 0.2)
    return made.double().requires_grad_(False)


def source(config: HeadConfig = EAGLE, *, ids: Sequence[int] | None = None, **given: Any) -> FeatureSource:
    return FeatureSource("eagle", head(config, ids), **{"window": 1000, **given})


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def states(positions: range, config: HeadConfig = EAGLE, seed: int = 0) -> Features:
    """Made-up states; those of a position are always the same."""
    rows = [np.random.default_rng((seed, position)).normal(size=config.state_size) for position in positions]
    data = np.array(rows, dtype="<f2").tobytes()
    return Features(
        data=data,
        rows=len(positions),
        width=config.state_size,
        dtype="float16",
        start=positions.start,
        layers=config.state_layers,
    )


def known(*ranges: range, config: HeadConfig = EAGLE, seed: int = 0) -> KnownStates:
    found = KnownStates()
    for each in ranges:
        found.add(states(each, config, seed))
    return found


def opening(tokens: Sequence[int], **fields: Any) -> OpenSession:
    return OpenSession(
        session_id="s", prompt_length=fields.pop("prompt_length", len(tokens)), tokens=tuple(tokens), sources=("eagle",),
        max_nodes=8, **fields,
    )  # fmt: skip


def report(session: FeatureSession, committed: Sequence[int]) -> None:
    session.observe(
        StepReport(
            session_id="s", committed=tuple(committed), length=len(session.tokens) + len(committed), prefix_hash=0,
            accepted_path=(), max_nodes=8,
        )
    )  # fmt: skip


def draft(own: FeatureSource, session: FeatureSession, states: KnownStates, max_nodes: int = 12, **more: Any) -> TokenTree:
    return own.draft([DraftWanted(session=session, max_nodes=max_nodes, states=states, **more)])[0]


def fresh(own: FeatureSource, tokens: Sequence[int], states: KnownStates, max_nodes: int = 12) -> TokenTree:
    """The draft of a session opened with everything."""
    return draft(own, own.open(opening(tokens, prompt_length=1)), states, max_nodes)


def same(one: TokenTree, other: TokenTree) -> None:
    assert (one.tokens, one.parents, one.sources) == (other.tokens, other.parents, other.sources)
    assert one.scores == pytest.approx(other.scores, rel=1e-4)


def after(own: FeatureHead, tokens: Sequence[int], states: KnownStates, path: Sequence[int]) -> HeadOutput:
    """What the head says after the text and ``path``: [h] each. Plainly, all rows anew, with its own states on the path."""
    config = own.config
    rows = [states.of(position, config.state_layers) for position in range(len(tokens) - 1)]
    numbers = [np.frombuffer(row.data, dtype="<f2").astype(np.float64) for row in rows if row is not None]
    assert len(numbers) == len(rows)
    given = own.fuse(torch.from_numpy(np.array(numbers)))
    whole = [*tokens, *path]
    for count in range(len(path) + 1):
        embeddings = own.embed(torch.tensor(whole[1 : len(tokens) + count]))
        positions = torch.arange(len(embeddings))
        made = own(embeddings[None], given[None], positions[None], causal)
        given = torch.cat((given, made.state[0, -1:]))
    return HeadOutput(hidden=made.hidden[0, -1], state=made.state[0, -1])


def log_q(own: FeatureHead, tokens: Sequence[int], states: KnownStates, path: Sequence[int] = ()) -> torch.Tensor:
    """[draft vocabulary], log-probabilities of the token after the text and ``path``."""
    return own.logits(after(own, tokens, states, path).hidden, own.vocabulary).log_softmax(-1)


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", [1000, 9])
def test_step_by_step_as_if_opened_anew(config: HeadConfig, window: int) -> None:
    """Whatever was drafted before leaves no trace, and true states replace the head's own."""
    own = source(config, window=window)
    tokens = text(40)
    session = own.open(opening(tokens[:8], prompt_length=1))
    length, drafts = 8, set()
    for count in (1, 3, 1, 2, 5, 4, 1, 12, 1):
        held = known(range(length - 1), config=config)
        tree = draft(own, session, held)
        assert len(tree) == 12 and max(depths(tree)) > 2
        same(tree, fresh(own, tokens[:length], held))
        # A second time: the same.
        same(tree, draft(own, session, held))
        drafts.add(tree.tokens)
        report(session, tokens[length : length + count])
        length += count
    assert len(drafts) == 9


def test_sixteen_sessions_as_one_by_one() -> None:
    """Texts of different lengths, greedy, with noise and drawn, some with states missing, in one batch."""
    own = source(ids=range(0, VOCABULARY, 2))
    wanted, alone = [], []
    for number in range(16):
        held = known(range(number % 5, 3 + number), seed=number)
        fields: dict[str, Any] = {"prompt_length": 2 + number % 3}
        if number % 3 == 1:
            fields |= {"temperature": 0.7, "noise": DraftNoise(seed=number, top_k=20 * (number % 2))}
        message = opening(text(4 + number, seed=number), **fields)
        nodes = 1 + 2 * number
        wanted.append(DraftWanted(session=own.open(message), max_nodes=nodes, states=held))
        alone.append(draft(own, own.open(message), held, nodes))
    for _ in range(2):
        for one, other, each in zip(own.draft(wanted), alone, wanted, strict=True):
            same(one, other)
            assert len(one) == each.max_nodes
    assert len({tree.tokens for tree in alone}) == 16
    # Nothing is wanted of one, and nothing can be said about another.
    trees = own.draft(
        [replace(wanted[0], max_nodes=0), DraftWanted(session=own.open(opening([1])), max_nodes=3, states=known())]
    )
    assert trees == [EMPTY_TREE, None]


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_paths_have_the_probabilities_of_the_head(config: HeadConfig) -> None:
    own, tokens, held = head(config), text(9), known(range(8), config=config)
    tree = fresh(source(config), tokens, held, 20)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    paths = {ROOT: (), **{node: tuple(tree.tokens[each] for each in path_to(tree, node)) for node in range(len(tree))}}
    scores = {ROOT: 1.0, **dict(enumerate(tree.scores))}
    for parent, nodes in children.items():
        logs = log_q(own, tokens, held, paths[parent])
        assert [tree.tokens[node] for node in nodes] == logs.topk(len(nodes)).indices.tolist()
        for node in nodes:
            assert tree.scores[node] == pytest.approx(scores[parent] * float(logs[tree.tokens[node]].exp()), rel=1e-4)
    # The likeliest of all whose parents were run.
    assert len(tree) == 20 and max(depths(tree)) >= 3


def published(own: FeatureHead, tokens: Sequence[int], held: KnownStates, total: int, depth: int, top_k: int) -> TokenTree:
    """EAGLE-2's ``topK_genrate``, with its own indices; the model is asked path by path."""
    total_tokens = total - 1
    paths: list[tuple[int, ...]] = [()]
    scores_list, parents_list, ss_token = [], [torch.zeros(1, dtype=torch.long)], []
    top = log_q(own, tokens, held).topk(top_k)
    scores = top.values
    scores_list.append(scores[None])
    ss_token.append(top.indices[None])
    input_ids, topk_cs_index = top.indices, torch.arange(top_k)
    paths = [(token,) for token in input_ids.tolist()]
    for i in range(depth):
        bias = 1 + top_k**2 * max(0, i - 1) + (top_k if i > 0 else 0)
        parents_list.append(topk_cs_index + bias)
        top = torch.stack([log_q(own, tokens, held, path) for path in paths]).topk(top_k)
        cu_scores = top.values + scores[:, None]
        topk_cs = cu_scores.view(-1).topk(top_k)
        topk_cs_index, scores = topk_cs.indices, topk_cs.values
        out_ids = topk_cs_index // top_k
        input_ids = top.indices.view(-1)[topk_cs_index]
        paths = [(*paths[beam], token) for beam, token in zip(out_ids.tolist(), input_ids.tolist(), strict=True)]
        ss_token.append(top.indices)
        scores_list.append(cu_scores)
    all_scores, all_tokens = torch.cat(scores_list).view(-1), torch.cat(ss_token).view(-1)
    top_scores_index = all_scores.topk(total_tokens).indices.sort().values
    draft_parents = torch.cat(parents_list)[top_scores_index // top_k]
    mask_index = torch.searchsorted(top_scores_index, draft_parents - 1)
    mask_index[draft_parents == 0] = -1
    return TokenTree(
        tokens=tuple(all_tokens[top_scores_index].tolist()),
        parents=tuple(mask_index.tolist()),
        sources=("eagle",) * total_tokens,
        scores=tuple(all_scores[top_scores_index].exp().tolist()),
    )


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("total", "depth", "top_k"), [(20, 3, 4), (12, 1, 6), (31, 5, 5)])
def test_eagle_2s_tree_is_the_authors(config: HeadConfig, total: int, depth: int, top_k: int) -> None:
    tokens, held = text(7, seed=3), known(range(6), config=config)
    own = source(config, form=TreeForm(dynamic=total, steps=depth, width=top_k))
    same(fresh(own, tokens, held, 512), published(head(config), tokens, held, total, depth, top_k))


def test_a_tree_holds_what_can_pay() -> None:
    held, tokens = known(range(11)), text(12)
    whole = fresh(source(), tokens, held, 40)
    least = sorted(whole.scores)[25]
    own = source()
    passes = counted(own)
    tree = draft(own, own.open(opening(tokens, prompt_length=1)), held, 40, min_probability=least)
    assert sorted(tree.scores) == sorted(score for score in whole.scores if score >= least)
    assert len(passes) <= 6
    # Nothing pays: one pass, which also brings the cache up to date.
    passes.clear()
    session = own.open(opening(tokens, prompt_length=1))
    assert not len(draft(own, session, held, 40, min_probability=1.0))
    assert len(passes) == 1
    assert draft(own, session, held, 1).tokens == whole.tokens[:1]
    assert passes[1:] == [1]
    # A chain.
    chain = fresh(source(form=TreeForm(steps=3, width=1)), tokens, held, 40)
    assert chain.parents == (-1, 0, 1, 2)


def counted(own: FeatureSource) -> list[int]:
    """The rows of each pass, from now on."""
    passes: list[int] = []
    own._head.register_forward_pre_hook(lambda module, given: passes.append(given[0].shape[1]))
    return passes


# --- states ----------------------------------------------------------------------------------------------------------


def test_nothing_is_drafted_while_the_target_reads_the_prompt() -> None:
    own = source()
    passes = counted(own)
    session, held = own.open(opening(text(12))), known()
    assert draft(own, session, held) is None
    held.add(states(range(5)))
    assert draft(own, session, held) is None and not passes
    # The prompt's states come before the first step's report, which brings the last one.
    held.add(states(range(5, 11)))
    report(session, [7])
    held.add(states(range(11, 12)))
    same(draft(own, session, held), fresh(own, [*text(12), 7], known(range(12))))
    assert passes[0] == 12


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_states_that_never_come_and_states_that_come_late(config: HeadConfig) -> None:
    own, tokens = source(config), text(20)
    blank = KnownStates()
    data = own._missing.numpy().astype("<f4").tobytes()
    for position in (*range(6), 13):
        blank.add(replace(states(range(position, position + 1), config), data=data, dtype="float32"))
    for chunk in (range(6, 13), range(14, 18)):
        blank.add(states(chunk, config))
    some = known(range(6, 13), range(14, 18), config=config)
    session = own.open(opening(tokens[:19]))
    masked = draft(own, session, some)
    same(masked, fresh(own, tokens[:19], blank))
    assert masked != fresh(own, tokens[:19], known(range(18), config=config))
    # They come after all, some of them with the next step: exactly the late rows are computed once more.
    passes = counted(own)
    some.add(states(range(2, 6), config))
    some.add(states(range(13, 14), config))
    some.add(states(range(18, 19), config))
    report(session, tokens[19:])
    late = draft(own, session, some)
    assert passes[0] == 4 + 1 + 1
    same(late, fresh(own, tokens, some))
    some.add(states(range(2), config))
    same(draft(own, session, some), fresh(own, tokens, known(range(19), config=config)))


def test_layers_are_picked_by_name_and_in_order() -> None:
    """More layers may arrive than the head reads, in another order; rows without them count as missing."""
    config = replace(EAGLE3, state_layers=(1, -1, 0))
    own, tokens = source(config), text(6)
    rows = np.random.default_rng(0).normal(size=(5, 4, SIZE)).astype("<f2")
    held, right, none = KnownStates(), KnownStates(), KnownStates()
    shape = states(range(5), config)
    held.add(replace(shape, data=rows.tobytes(), width=4 * SIZE, layers=(-1, 0, 7, 1)))
    right.add(replace(shape, data=rows[:, [3, 0, 1]].tobytes()))
    none.add(replace(shape, data=rows[:, :2].tobytes(), width=2 * SIZE, layers=(-1, 0)))
    same(fresh(own, tokens, held), fresh(own, tokens, right))
    session = own.open(opening(tokens))
    report(session, [3])
    assert draft(own, session, none) == draft(own, session, KnownStates())
    wide = known(range(5), config=replace(config, target_hidden_size=2 * SIZE))
    with pytest.raises(ValueError, match="a state has 64 numbers per layer: the head reads 32"):
        fresh(own, tokens, wide)


def test_the_window_is_all_that_is_read() -> None:
    window = 10
    own, tokens = source(window=window), text(30)
    tree = fresh(own, tokens, known(range(29)))
    others = [*text(19, seed=5), *tokens[19:]]
    mixed = known(range(19), seed=5)
    mixed.add(states(range(19, 29)))
    same(tree, fresh(own, others, mixed))
    assert tree != fresh(source(window=window + 1), tokens, known(range(29)))
    # A head's own window counts, too.
    same(tree, fresh(source(replace(EAGLE, window=window)), tokens, known(range(29))))


def test_a_cache_is_moved_and_grows_without_a_trace() -> None:
    own = source(window=300)
    tokens = text(1500)
    session = own.open(opening(tokens[:250], prompt_length=1))
    for length in range(250, 1500, 25):
        tree = draft(own, session, known(range(max(0, length - 320), length - 1)))
        if length % 200 == 0:
            same(tree, fresh(own, tokens[:length], known(range(max(0, length - 320), length - 1))))
            assert session.cache.nbytes < 4 * (300 + 256 + 40) * 2 * 2 * 8 * 8
        report(session, tokens[length : length + 25])


def test_long_texts_are_read_in_pieces_beside_others() -> None:
    own = source(window=4000)
    passes = counted(own)
    tokens = text(2000)
    long = DraftWanted(session=own.open(opening(tokens)), max_nodes=5, states=known(range(1999)))
    short = DraftWanted(session=own.open(opening(tokens[:9])), max_nodes=5, states=known(range(8)))
    trees = own.draft([long, short])
    assert trees[0] is None and passes[0] == 8 + 256
    same(trees[1], fresh(own, tokens[:9], known(range(8)), 5))
    passes.clear()
    first, second = own.draft([long])[0], own.draft([long])[0]
    assert first is None and len(second) == 5 and max(passes) == 1024


def test_caches_have_a_bound() -> None:
    free, bound = source(), source(most_bytes=60_000)
    sessions = [bound.open(opening(text(40, seed=number))) for number in range(6)]
    for _ in range(2):
        for number, session in enumerate(sessions):
            held = known(range(39), seed=number)
            same(draft(bound, session, held), fresh(free, text(40, seed=number), held))
            assert sum(each.cache.nbytes for each in sessions) <= 60_000
    assert sum(each.cache.nbytes > 0 for each in sessions) < 6


def test_what_is_noted_of_rows_without_a_state_goes_with_the_rows() -> None:
    own, tokens = source(), text(30)
    session, held = own.open(opening(tokens)), known(range(10, 29))
    for _ in range(3):
        same(draft(own, session, held), fresh(own, tokens, held))
        assert session._without == list(range(10))
        # As when other sessions need the room.
        session.cache.clear()


def test_after_a_failure_drafts_are_right_again() -> None:
    own, tokens, held = source(), text(16), known(range(15))
    session = own.open(opening(tokens[:10]))
    draft(own, session, known(range(9)))
    report(session, tokens[10:])
    for failing in (1, 2, 3):
        passes = counted(own)

        def fail(module: object, given: object, passes: list[int] = passes, failing: int = failing) -> None:
            if len(passes) == failing:
                raise RuntimeError("planted failure")

        hook = own._head.register_forward_hook(lambda module, given, made: fail(module, given))
        with pytest.raises(RuntimeError, match="planted"):
            draft(own, session, held)
        hook.remove()
    same(draft(own, session, held), fresh(own, tokens, held))


def test_nothing_of_a_text_remains() -> None:
    own = source(ids=range(0, VOCABULARY, 2))
    session = own.open(opening(text(16), temperature=1.0, noise=DraftNoise(seed=1)))
    draft(own, session, known(range(15)))
    session.close()
    own.forget("t")
    assert not session.tokens and not session.cache.nbytes and session.extra is None and session.noise is None
    assert draft(own, session, known(range(15))) is None


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_a_requests_own_words_can_be_drafted() -> None:
    ids = [4, 9, 11, 30]
    own, prompt = source(ids=ids), [9, 17, 50, 3, 17]
    tokens = [*prompt, *text(6)]
    session = own.open(opening(tokens, prompt_length=len(prompt)))
    tree = draft(own, session, known(range(10)), 30)
    usable = sorted({*ids, *prompt})
    assert set(tree.tokens) <= set(usable) and set(tree.tokens) & {17, 50, 3}
    # As a head whose vocabulary is both together.
    same(tree, fresh(source(ids=usable), tokens, known(range(10)), 30))
    # Trained output rows are the head's own: others do not fit beside them.
    trained = source(EAGLE3, ids=ids)
    tree = draft(trained, trained.open(opening(tokens, prompt_length=5)), known(range(10), config=EAGLE3), 30)
    assert set(tree.tokens) <= set(ids)


@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}], ids=str
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_with_the_targets_own_distribution_its_choice_comes_first(temperature: float, cut: dict[str, Any]) -> None:
    """At every position and every depth: the target chooses with the same noise."""
    from services.verifier.choosing.walks import RequestState
    from services.verifier.target_port import Sampling

    params = SamplingParams(temperature=temperature, seed=11, **cut)
    own, tokens = source(), text(6)
    model, start = head(EAGLE), len(tokens)
    held = known(range(60))
    session = own.open(opening(tokens, temperature=temperature, noise=DraftNoise(seed=11, **cut)))
    cutting = RequestState(Sampling(params=params, prompt_length=6), frozenset(), ModelProcessors()).truncation

    def choice(path: Sequence[int]) -> int:
        whole = KnownStates()
        whole.add(states(range(len(tokens) - 1)))
        logits = model.logits(after(model, tokens, whole, path).hidden, model.vocabulary).float() / temperature
        return choose(logits if cutting is None else cutting(logits, ()), params, params.seed, len(tokens) + len(path))

    while len(tokens) < start + 12:
        path: list[int] = []
        tree = draft(own, session, held, 40)
        node = ROOT
        while len(path) < 3 and node in tree.parents:
            node = tree.parents.index(node)
            path.append(tree.tokens[node])
            assert path[-1] == choice(path[:-1])
        assert path
        tokens += path
        report(session, path)


def test_a_chain_is_drawn_from_what_it_says() -> None:
    own = source(form=TreeForm(steps=3), draw=draw_with(np.random.default_rng(0)))
    model, tokens, held = head(EAGLE), text(8), known(range(7))
    session = own.open(opening(tokens, temperature=0.8, sampled=True))
    q = torch.softmax(model.logits(after(model, tokens, held, ()).hidden, model.vocabulary) / 0.8, -1)
    counts = np.zeros(VOCABULARY)
    for _ in range(1500):
        tree = draft(own, session, held, 3)
        validate(tree, vocab_size=VOCABULARY, max_nodes=3)
        assert tree.parents == (-1, 0, 1)
        counts[tree.tokens[0]] += 1
    first = dict(zip(tree.proposals[0].token_ids, tree.proposals[0].probabilities, strict=True))
    assert first == pytest.approx({token: float(q[token]) for token in first}, rel=1e-4)
    assert sum(first.values()) == pytest.approx(1) and len(first) == VOCABULARY
    deviation = (counts - 1500 * q.numpy()) / np.sqrt(1500 * q.numpy() + 1)
    assert np.abs(deviation).max() < 4.5
    second = torch.softmax(model.logits(after(model, tokens, held, tree.tokens[:1]).hidden, model.vocabulary) / 0.8, -1)
    assert tree.proposals[1].probabilities[0] == pytest.approx(float(second.max()), rel=1e-4)
    # Its length depends on nothing that is drawn; greedy requests need no draws.
    assert len(draft(own, session, held, 3, min_probability=1.0)) == 3
    greedy = draft(own, own.open(opening(tokens, sampled=True)), held, 3)
    assert not greedy.proposals


def test_threads_of_a_head_are_its_own() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def head_thread() -> None:
        use_threads(before + 1)
        seen.append(torch.get_num_threads())

    for work in (head_thread, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [before + 1, before]
    assert torch.get_num_threads() == before
