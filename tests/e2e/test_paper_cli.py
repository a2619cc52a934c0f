"""``outrider paper`` as a user runs it, on a tiny model: every row of every paper decodes as plain decoding does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.bench.records import Request
from benchmarks.papers.engine import SETTINGS, PaperEngine
from cluster.models.target import resolve
from cluster.settings.config import load
from services.router.tokens import Tokens
from speculation.types import SamplingParams
from tests.e2e.command_line import run_here
from tests.tiny_models.draft_models import make_tiny_draft
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_head, make_medusa, make_streams
from tests.trainings.training_data import make_tiny_data
from training.recipe import load_recipe

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("papers") / "target")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("the quick brown fox the quick brown fox\nprompt lookup copies what was said before, and before that\n")
    return file


@pytest.fixture
def small(target: Path, prompts: Path) -> list[str]:
    return ["--model", str(target), "--prompts", str(prompts), "--max-tokens", "24"]


def rows(folder: Path) -> dict[str, list[dict[str, str]]]:
    found = json.loads((folder / "results.json").read_text())
    assert found["changed"] == [] and found["missing"] == []
    return {table["title"]: table["rows"] for table in found["tables"]}


def test_spectra(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(4):
        (corpus / f"{number}.txt").write_text(f"prompt lookup {number} copies what was said before, and before that " * 4)
    run = [*small, "--out", str(tmp_path / "run"), "--corpus", str(corpus)]
    assert run_here("paper", "spectra", *run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["paper"] == "spectra"
    tables = rows(tmp_path / "run")
    assert [row["method"] for row in tables["Table 2: ablations, greedy"]] == [
        "REST", "Lookahead", "Lookahead + REST", "CORE Module", "- w/o Forward Dict", "- w/o Backward Dict",
        "- w/o Sub-Ngram", "RETRIEVAL Module", "- w/o PPL refine", "SPECTRA",
    ]  # fmt: skip
    assert {row["= plain"] for table in tables.values() for row in table if "= plain" in row} == {"2 of 2"}
    filters = tables["RETRIEVAL by how its documents were kept, greedy"]
    assert [row["method"].partition(":")[0].partition(" up to ")[0] for row in filters] == ["all", *3 * ["perplexity"]]
    assert ["by tokens" in row["method"] for row in filters] == [False, False, True, False]
    assert filters[0]["method"].startswith("all: 4 of 4 documents, ")
    guesses = {
        row["where a guess comes from"]: int(row["checked tokens"]) for row in tables["Figure 3: which guesses are accepted"]
    }
    assert {"forward", "sub_ngram", "backward"} <= guesses.keys()
    # All is measured: the same command measures nothing, and other options are another run.
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "units").iterdir()}
    assert run_here("paper", "spectra", *run) == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "units").iterdir()} == before
    assert run_here("paper", "spectra", *run, "--seed", "2") == 2
    assert "seed 1, and this one has 2" in capsys.readouterr().err
    assert run_here("paper", "spectra", *run, "--set", "drafter.suffix_max_tokens=5000") == 2
    assert "settings null, and this one has ['drafter.suffix_max_tokens=5000']" in " ".join(capsys.readouterr().err.split())
    assert run_here("paper", "spectra", *run, "--index", str(corpus)) == 2
    assert "--corpus" in capsys.readouterr().err
    page = tmp_path / "papers.md"
    assert run_here("paper", "page", str(tmp_path / "run"), "--out", str(page)) == 0
    assert "## SPECTRA" in page.read_text() and (tmp_path / "plots" / "papers" / "spectra-guesses.svg").is_file()


def test_an_index_that_is_none_is_refused_before_others_are_made(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    assert run_here("paper", "spectra", *small, "--out", str(tmp_path / "run"), "--other-index", str(tmp_path)) == 2
    assert f"{tmp_path} holds no index" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("paper-indexes"))


@pytest.fixture(scope="module")
def drafters(target: Path) -> list[str]:
    """A draft model and heads of every kind, which are right now and then."""
    beside = target.parent
    made = [
        make_tiny_draft(target, beside / "draft"),
        make_medusa(target, beside / "medusa"),
        make_streams(target, beside / "streams"),
        make_head(target, beside / "fspad", "fspad"),
        make_head(target, beside / "eagle", "eagle"),
        make_head(target, beside / "eagle3", "eagle3"),
    ]
    return [part for folder in made for part in ("--drafter", str(folder))]


# Each with EAGLE-2's tree, and with the best-first one.
HEADS = [f"{name}{tree}" for name in ("EAGLE-2", "EAGLE-3", "FSPAD") for tree in ("", ", best-first tree")]


@pytest.mark.parametrize(
    ("paper", "methods"),
    [
        (
            "fspad",
            {
                "Table 1, greedy": ["PLD", "Lookahead", "Medusa", *HEADS],
                "Table 1, temperature 1": HEADS,
                "Table 2: half the tree, greedy": HEADS,
            },
        ),
        (
            "streaming",
            {
                "Table 1: speed-up, call reduction, parameters": ["Medusa", "SS", "SS, drafted beside the target"],
                "Table 2: calls and latency per answer": ["Two-model SD", "SS"],
                "The number of streams (γ)": ["SS, γ = 1", "SS, γ = 2", "SS, drafted beside the target"],
            },
        ),
        (
            "blog",
            {
                "Speculative sampling": ["Speculative Sampling", "Speculative Sampling, temperature 1"],
                "N-gram decoding": ["Ngrams decoding"],
            },
        ),
    ],
)
def test_papers_of_trained_drafters(
    paper: str, methods: dict[str, list[str]], small: list[str], drafters: list[str], tmp_path: Path
) -> None:
    assert run_here("paper", paper, *small, *drafters, "--out", str(tmp_path / "run")) == 0
    tables = rows(tmp_path / "run")
    assert {title: [row["method"] for row in found] for title, found in tables.items()} == methods
    assert {row["= plain"] for found in tables.values() for row in found} == {"2 of 2"}


@pytest.fixture(scope="module")
def data(target: Path) -> Path:
    folder = target.parent / "data"
    make_tiny_data(target, folder, sequences=24)
    assert run_here("train", "vocabulary", "--data", str(folder), "--size", "200") == 0
    return folder


def _train(data: Path, target: Path, out: Path, recipe: str, **changed: object) -> Path:
    """A run of a few steps of a recipe with some values changed."""
    values = load_recipe(recipe, **{"batch_rows": 200, "micro_rows": 100, "steps": 4, **changed}).model_dump(mode="json")
    file = out.parent / f"{out.name}.json"
    # JSON is YAML.
    file.write_text(json.dumps(values))
    made = ["--data", str(data), "--vocabulary", str(data), "--model", str(target), "--out", str(out)]
    assert run_here("train", "run", "--recipe", str(file), *made) == 0
    return out


def test_the_ablation_of_fspad(data: Path, target: Path, small: list[str], tmp_path: Path) -> None:
    head = ["--drafter", str(make_head(target, target.parent / "fspad", "fspad"))]
    runs = [
        _train(data, target, tmp_path / f"run {number}", recipe, seed=seed)
        for number, (recipe, seed) in enumerate(
            [("eagle_matched", 1), ("fspad_alignment_only", 1), ("fspad_sampler_only", 1), ("fspad_sampler_only", 2)]
        )
    ]
    assert run_here("train", "evaluate", str(runs[0]), "--data", str(data), "--model", str(target), "--trees", "") == 0
    named = [part for run in runs for part in ("--ablation", str(run))]
    out = tmp_path / "out"
    few = [*small, "--max-tokens", "10", *head]
    assert run_here("paper", "fspad", *few, *named, "--out", str(out)) == 0
    for title in ("greedy", "temperature 1"):
        table = rows(out)[f"Table 3: the parts one by one, {title}"]
        assert [(row["method"], row["runs"], row["= plain"]) for row in table] == [
            ("w/o both", "1", "2 of 2"), ("w/o FS", "1", "2 of 2"), ("w/o PAD", "2", "4 of 4"),
        ]  # fmt: skip
        assert [row["1st draft"] == "–" for row in table] == [False, True, True]
        assert ["±" in row["τ"] for row in table] == [False, False, True]
    assert (out / "plots" / "fspad-ablation-losses.svg").is_file()
    # Other heads are another run.
    assert run_here("paper", "fspad", *few, *named[2:], "--out", str(out)) == 2


def test_the_shared_form_of_streams(
    data: Path, target: Path, small: list[str], drafters: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is trained and exported, refused by whatever serves, and a row of its paper's table."""
    changed: dict[str, object] = {
        "main_weight": 10.0,
        "learning_rate": 0.02,
        "stream_layers": 1,
        "anchors": 1.0,
        "steps": 30,
    }
    run, folder = _train(data, target, tmp_path / "run", "streams", **changed), tmp_path / "shared"
    losses = [json.loads(line)["losses"]["target's own"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert run_here("train", "evaluate", str(run), "--data", str(data), "--model", str(target)) == 2
    assert "main_weight is 10.0" in capsys.readouterr().err
    assert run_here("train", "export", str(run), "--model", str(target), "--out", str(folder)) == 0
    for command in (["paper", "fspad", *small, *drafters], ["plan", "--model", str(target), "--set"]):
        named = ["--drafter", str(folder)] if command[0] == "paper" else [f"drafter.models=[{folder}]"]
        assert run_here(*command, *named) == 2
        assert "mode is shared: must be frozen" in capsys.readouterr().err
    out = tmp_path / "out"
    assert run_here("paper", "streaming", *small, *drafters, "--drafter", str(folder), "--out", str(out)) == 0
    for title in ("Table 1: speed-up, call reduction, parameters", "Table 2: calls and latency per answer"):
        found = {row["method"]: row for row in rows(out)[title]}
        assert found["SS"]["= plain"] == "2 of 2"
        # Of a target that was tuned at such a rate nothing is left.
        assert found["SS, shared (other tokens)"]["= plain"] == "0 of 2"
    twice = ["--drafter", str(folder), "--drafter", str(folder)]
    assert run_here("paper", "streaming", *small, *drafters, *twice, "--out", str(out)) == 2
    assert "the streams of one" in capsys.readouterr().err


@pytest.mark.parametrize(("paper", "source"), [("fspad", "fspad"), ("streaming", "streams")])
def test_what_must_be_trained_first_is_named(
    paper: str, source: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("paper", paper, *small, "--out", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert f"outrider train run --recipe {source} --data DATA" in said and "then --drafter FOLDER" in said


def test_disco(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = make_tiny_draft(target, target.parent / "draft")
    make_tiny_data(target, tmp_path / "data", sequences=12)
    classifier, options = tmp_path / "disco.safetensors", ["--model", str(target)]
    made = ["train", "disco", "--data", str(tmp_path / "data"), "--draft", str(draft), "--out", str(classifier)]
    assert run_here(*made, *options, "--cost-ratio", "0.2", "--steps", "5") == 0
    prompts = tmp_path / "prompts.jsonl"
    texts = ["the quick brown", "prompt lookup", "over the lazy dog"]
    prompts.write_text("\n".join(json.dumps({"turns": [text], "category": "qa", "question_id": text}) for text in texts))
    options += ["--prompts", str(prompts), "--drafter", str(draft), "--max-tokens", "16", "--quick", "--per-task", "3"]
    options += ["--out", str(tmp_path / "run")]
    assert run_here("paper", "disco", *options) == 2
    assert "--classifier is missing: outrider train disco --data DATA --draft" in capsys.readouterr().err
    assert run_here("paper", "disco", *options, "--classifier", str(classifier)) == 0
    # The same one in the draft model's folder is found there, and the run goes on: it is done.
    (draft / "disco").mkdir(exist_ok=True)
    for file in (classifier, classifier.with_suffix(".json")):
        shutil.copy(file, draft / "disco" / f"classifier{file.suffix}")
    assert run_here("paper", "disco", *options) == 0
    tables = rows(tmp_path / "run")
    speeds = {row["method"]: row for row in tables["Table 1: speed-up over the target alone, greedy"]}
    assert {"Target", "dynHeur SL", "Static SL-5", "Static SL-opt", "DISCO", "Oracle"} <= speeds.keys()
    assert {row["= plain"] for row in speeds.values()} == {"1 of 1 tasks"} and speeds["Target"]["qa"] == "1.00x"
    assert {path.stem for path in (tmp_path / "run" / "plots").iterdir()} == {
        "disco-one-answer", "disco-lengths", "disco-over-answers",
    }  # fmt: skip


def test_a_replay_with_the_model_computes_windows(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes the passes that the engine takes, which are fewer than without windows; another's answers are refused."""
    settings = load(flags=[*SETTINGS, f"model={target}"])
    engine = PaperEngine(settings, resolve(settings.model, settings.cache_dir))
    prompt = Tokens(str(target)).encode("the quick brown fox")
    answer = engine.answer(Request(id="a", task="text", prompt=prompt, seed=0), SamplingParams(max_tokens=48, temperature=0))
    engine.close()
    run = tmp_path / "traces.jsonl"
    trace = {"prompt_ids": list(prompt), "output_ids": list(answer.tokens)}
    run.write_text(json.dumps(trace))
    capsys.readouterr()
    taus = []
    for more in ([], ["--model", str(target)]):
        assert run_here("replay", str(run), "--strategies", "lookahead", "--budgets", "120", "--json", *more) == 0
        (table,) = json.loads(capsys.readouterr().out)
        taus.append(float(table["rows"][0]["all"]))
    assert taus[1] >= taus[0] >= 1
    trace["output_ids"][3] = (trace["output_ids"][3] + 1) % 300
    run.write_text(json.dumps(trace))
    assert run_here("replay", str(run), "--strategies", "lookahead", "--budgets", "9", "--model", str(target)) == 2
    assert "its greedy answer to trace 1 is another one from token 3 on" in capsys.readouterr().err
