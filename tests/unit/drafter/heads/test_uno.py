"""Uno as a source: the noise that it asks for, the trees that it makes of what the target says of it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import drafter_config, verifier_config
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.uno.config import UnoConfig, parse_uno
from services.drafter.heads.uno.marginals import ClaimRates, likeliest_paths
from services.drafter.heads.uno.source import NAME, UnoSession, UnoSource
from services.drafter.sources.catalogue import make_source
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import ROOT, likely_ends, validate
from speculation.types import EMPTY_TREE, Observation, TokenTree
from tests.running.refusals import refuses
from tests.tiny_models.draft_folders import make_target, settings_of
from tests.tiny_models.trained_heads import make_uno

BELOW = 300
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def adapter(target: Path) -> Path:
    return make_uno(target, target.parent / "uno")


def opened(adapter: str = "", **form: int) -> UnoSession:
    source = UnoSource(UnoConfig(noise_below=BELOW), **form)
    return source.open(
        OpenSession(session_id="s", tokens=PROMPT, prompt_length=3, sources=(NAME,), max_nodes=9, adapter=adapter)
    )


def step(tree: TokenTree, path: Sequence[int], committed: Sequence[int], said: Sequence[Sequence[int]] = ()) -> StepReport:
    """A step that checked ``tree``. ``said``: the likely tokens after each of its probes."""
    probes = tuple(map(tuple, said))
    return StepReport(
        session_id="s",
        committed=tuple(committed),
        length=0,
        prefix_hash=0,
        accepted_path=tuple(path),
        max_nodes=9,
        observation=Observation(tree=tree, top_ids=((1,),), probe_ids=probes),
    )


def noise_behind(tree: TokenTree, end: int) -> list[int]:
    """The probes of the chain behind a node."""
    found: list[int] = []
    for node in tree.probes:
        if tree.parents[node] == (found[-1] if found else end):
            found.append(node)
    return found


def test_passes_take_turns() -> None:
    session = opened(rows=3)
    noise = session.draft(9, 0.0)
    assert noise.parents == (-1, 0, 1) and noise.probes == (0, 1, 2) and noise.sources == (NAME,) * 3
    assert all(1 <= token < BELOW for token in noise.tokens) and len(set(noise.tokens)) > 1
    validate(noise, vocab_size=BELOW, max_nodes=9)
    # It is the text's: asked again, it is the same.
    assert session.draft(9, 0.0) == noise
    # The row of the text yields a token (8); the noise says what may follow it.
    session.observe(step(noise, (), (8,), ((21, 22), (31, 32), (41, 42))))
    tree = session.draft(4, 0.0)
    assert not tree.probes and tree.tokens[:3] == (21, 31, 41) and tree.parents[:3] == (-1, 0, 1)
    assert len(tree) == 4 and list(tree.scores) == sorted(tree.scores, reverse=True)
    session.observe(step(tree, (0, 1), (21, 31, 55)))
    again = session.draft(9, 0.0)
    assert again.probes == (0, 1, 2) and again.tokens != noise.tokens


def test_the_budget_of_nodes_holds() -> None:
    for most in range(12):
        session = opened(rows=3, ends=2)
        noise = session.draft(most, 0.0)
        assert len(noise) == min(3, most)
        session.observe(step(noise, (), (8,), [(21 + 10 * row, 22 + 10 * row) for row in range(len(noise))]))
        tree = session.draft(most, 0.0)
        assert len(tree) <= most and (not most or len(tree) > len(tree.probes))
        validate(tree, vocab_size=BELOW, max_nodes=most)


def test_noise_behind_the_likely_ends_of_a_tree() -> None:
    session = opened(rows=2, ends=2)
    session.observe(step(session.draft(9, 0.0), (), (8,), ((21, 22), (31, 32))))
    tree = session.draft(9, 0.0)
    drafted = len(tree) - len(tree.probes)
    ends = {tree.parents[node] for node in tree.probes if tree.parents[node] not in tree.probes}
    chances = dict(likely_ends(tree.parents[:drafted], tree.scores[:drafted]))
    assert sorted(ends, key=lambda end: -chances[end]) == sorted(chances, key=lambda end: -chances[end])[:2]
    for end in ends:
        assert [tree.tokens[node] for node in noise_behind(tree, end)] == [tree.tokens[node] for node in tree.probes[:2]]
    # Where the path ends at one of them, the next draft is a tree at once; elsewhere it is noise.
    for end in chances:
        another = opened(rows=2, ends=2)
        another.observe(step(another.draft(9, 0.0), (), (8,), ((21, 22), (31, 32))))
        assert another.draft(9, 0.0) == tree
        path = [] if end == ROOT else [*([tree.parents[end]] if tree.parents[end] != ROOT else []), end]
        said = [(50 + 10 * node, 51 + 10 * node) for node in range(len(tree.probes))]
        another.observe(step(tree, path, (*(tree.tokens[node] for node in path), 77), said))
        following = another.draft(2, 0.0)
        if end in ends:
            own = [tree.probes.index(node) for node in noise_behind(tree, end)]
            assert following.tokens[0] == said[own[0]][0] and not following.probes
            assert set(following.tokens) <= {token for at in own for token in said[at]}
        elif not any(node in ends for node in (ROOT, *path)):
            assert following.probes == (0, 1)


def test_others_tokens_that_were_accepted_use_up_the_first_marginals() -> None:
    session = opened(rows=3)
    noise = session.draft(9, 0.0)
    # Beside a draft of another source, whose two tokens were accepted.
    beside = TokenTree(
        tokens=(90, 91, *noise.tokens),
        parents=(-1, 0, *(-1 if parent == ROOT else parent + 2 for parent in noise.parents)),
        sources=("joined",) * 5,
        probes=(2, 3, 4),
    )
    session.observe(step(beside, (0, 1), (90, 91, 92), ((21,), (31,), (41,))))
    assert session.draft(9, 0.0).tokens == (41,)
    used = opened(rows=2)
    noise = used.draft(9, 0.0)
    beside = TokenTree(tokens=(90, 91, *noise.tokens), parents=(-1, 0, -1, 2), sources=("joined",) * 4, probes=(2, 3))
    used.observe(step(beside, (0, 1), (90, 91, 92), ((21,), (31,))))
    assert used.draft(9, 0.0).probes == (0, 1)


def test_nothing_is_drafted_for_answers_with_an_adapter() -> None:
    assert opened(adapter="billing").draft(9, 0.0) == EMPTY_TREE


def test_how_much_of_a_claim_comes_true_is_learnt() -> None:
    rates = ClaimRates()
    claimed = [(4, 0.5), (5, 0.3)]
    assert rates.of(0, claimed) == claimed
    for number in range(300):
        rates.learn(0, claimed, 5 if number % 4 == 0 else 9)
    found = [chance for _, chance in rates.of(0, claimed)]
    assert sum(found) == pytest.approx(0.25, abs=0.05) and found[0] / found[1] == pytest.approx(5 / 3)
    assert rates.of(1, claimed) == claimed and rates.worth(1) > rates.worth(0)
    for _ in range(2000):
        rates.learn(0, claimed, 4)
    assert 0.9 < sum(chance for _, chance in rates.of(0, claimed)) < 1


def test_a_tree_knows_how_likely_each_guess_is() -> None:
    for chances, expected in (((0.9, 0.05), (21, 31, 32, 22)), ((0.5, 0.45), (21, 22, 31, 31))):
        session = opened(rows=2)
        report = step(session.draft(9, 0.0), (), (8,), ((21, 22), (31, 32)))
        assert report.observation is not None
        told = replace(report.observation, probe_chances=(chances, (0.6, 0.3)))
        session.observe(replace(report, observation=told))
        assert session.draft(4, 0.0).tokens == expected


def test_paths_are_the_likeliest() -> None:
    levels = [[(1, 0.6), (2, 0.3)], [(3, 0.5), (4, 0.4)]]
    tokens, parents, scores = likeliest_paths(levels, 6, 0.0)
    assert (tokens, parents) == ([1, 2, 3, 4, 3, 4], [-1, -1, 0, 0, 1, 1])
    assert scores == pytest.approx([0.6, 0.3, 0.3, 0.24, 0.15, 0.12])
    assert likeliest_paths(levels, 6, 0.2)[0] == [1, 2, 3, 4] and likeliest_paths(levels, 2, 0.0)[0] == [1, 2]


def with_config(adapter: Path, folder: Path, **fields: object) -> Path:
    copy = Path(shutil.copytree(adapter, folder))
    (copy / "config.json").write_text(json.dumps(fields))
    return copy


def test_where_the_bound_of_the_noise_is_said(target: Path, adapter: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    # The tokenizer has a token for each number.
    assert parse_uno(adapter, target).noise_below == vocabulary
    assert parse_uno(with_config(adapter, tmp_path / "own", mask_token_id=17, noise="uniform"), target).noise_below == 17
    other = Path(shutil.copytree(target, tmp_path / "target"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary + 9}))
    assert parse_uno(adapter, other).noise_below == vocabulary
    (other / "config.json").write_text(json.dumps({**config, "mask_token_id": 40}))
    assert parse_uno(adapter, other).noise_below == 40
    (other / "config.json").write_text(json.dumps(config))
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({"id": 33, "content": "<|MASK|>"})
    file.write_text(json.dumps(content))
    assert parse_uno(adapter, other).noise_below == 33
    file.unlink()
    assert parse_uno(adapter, other).noise_below == vocabulary


def test_what_cannot_draft_is_refused(target: Path, adapter: Path, tmp_path: Path) -> None:
    for number, mask in enumerate((1, 321, "17", True)):
        with refuses(ConfigurationError, "mask_token_id", mask, allowed="a whole number from 2 to 320"):
            inspect(with_config(adapter, tmp_path / f"{number}", mask_token_id=mask), target)
    with refuses(ConfigurationError, "noise", "mask", allowed="uniform"):
        inspect(with_config(adapter, tmp_path / "noise", noise="mask"), target)
    empty = Path(shutil.copytree(adapter, tmp_path / "empty"))
    (empty / "adapter_model.safetensors").unlink()
    with refuses(ConfigurationError, says="no adapter_model.safetensors there"):
        inspect(empty, None)
    dora = Path(shutil.copytree(adapter, tmp_path / "dora"))
    fields = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**fields, "use_dora": True}))
    with refuses(ConfigurationError, "use_dora", "true"):
        inspect(dora, None)
    assert inspect(adapter, target).source == NAME and inspect(adapter, None).in_target


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        (("drafter.speculative_num_steps=40", "verifier.max_nodes=32"), "drafter.speculative_num_steps", 40),
        (("verifier.kernels=torch",), "drafter.models", None),
        (("verifier.device=cuda", "verifier.dtype=bfloat16"), "drafter.models", None),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_where_passes_hold_no_noise(target: Path, adapter: Path, more: tuple[str, ...], field: str, value: object) -> None:
    with refuses(ConfigurationError, field, value):
        verifier_config(settings_of(target, adapter, more=more), ResolvedModel(name="tiny", path=target))


def test_stages_and_ranks_hold_noise(target: Path, adapter: Path) -> None:
    more = ("verifier.stages=2", "verifier.tensor_parallel_size=2")
    made = verifier_config(settings_of(target, adapter, more=more), ResolvedModel(name="tiny", path=target)).target
    assert made.draft_adapter == adapter and made.processes == 4


def test_one_adapter_drafts(target: Path, adapter: Path) -> None:
    model = ResolvedModel(name="tiny", path=target)
    assert verifier_config(settings_of(target, adapter), model).target.draft_adapter == adapter
    assert verifier_config(settings_of(target), model).target.draft_adapter is None
    more = ("drafter.uno_branches=2", "drafter.speculative_num_steps=5", "drafter.speculative_eagle_topk=4")
    made = make_source(NAME, drafter_config(settings_of(target, adapter, more=more), model))
    assert isinstance(made, UnoSource) and (made.ends, made.rows, made.width) == (2, 5, 4)
    named = f"drafter.models=[{adapter}, {{folder: {adapter}, name: other}}]"
    with refuses(ConfigurationError, "drafter.models", "the adapters uno, uno@other"):
        verifier_config(settings_of(target, more=(named,)), model)
    with refuses(ConfigurationError, "drafter.uno_branches", 2):
        verifier_config(settings_of(target, more=("drafter.uno_branches=2",)), model)
