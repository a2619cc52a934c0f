"""Prompts of many kinds for training data, made of public sets and of lists, the same for the same seed.

    python -m lab.training_prompts --corpus FOLDER --out prompts
    outrider train data --prompts prompts/articles.jsonl --samples 1 --out articles
    python -m lab.training_prompts --corpus FOLDER --out prompts --articles articles

FOLDER holds ``gsm8k_train.jsonl``, ``mbpp_train.jsonl`` and ``oasst_prompts.jsonl``. One file a kind is written, for
``outrider train data``. The last call adds those made of the target's own articles. None of the prompts is one of
Spec-Bench's or HumanEval's, but they are of the same kinds, so a drafter trained on them says little about other kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cluster.models.target import BUILT_IN, resolve
from services.machine.processor import cache_folder
from services.router.tokens import Tokens
from training.shards import read_shards

Messages = list[dict[str, str]]

PLACES = (
    "Lisbon", "Nairobi", "a small town in Ohio", "Osaka", "the Scottish Highlands", "Lima", "Helsinki", "Mumbai",
    "New Orleans", "Cape Town", "the Norwegian coast", "Hanoi", "a village in Provence", "Toronto", "Cairo",
    "Wellington", "Prague", "Seoul",
)  # fmt: skip
EVENTS = (
    "the opening of a new library", "a flood that closed the main bridge",
    "a local election with a surprising result", "a marathon with ten thousand runners",
    "the discovery of an old shipwreck", "a strike of bus drivers", "a festival of street food",
    "a school that won a science prize", "the return of wolves to the forest", "a fire in a historic market",
)  # fmt: skip
SUBJECTS = (
    "the honey bee", "volcanoes", "the printing press", "the Roman aqueducts", "photosynthesis", "the stock exchange",
    "jazz", "glaciers", "vaccines", "the Silk Road", "chess", "coffee", "earthquakes", "the telescope", "coral reefs",
    "bridges", "the human heart", "tea", "sailing ships", "the bicycle", "desert animals", "the moon", "bread",
    "the postal service", "lighthouses", "rice", "the violin",
)  # fmt: skip
TASKS = (
    "Write a short story about {}.", "Write an email to a friend about {}.", "Explain {} to a child.",
    "Give five tips about {}.", "Compose a poem about {}.", "Describe a day in the life of someone who studies {}.",
    "List three common mistakes about {} and correct them.", "Write a speech about {} for a school.",
    "Compare {} with {}.", "Make a table of facts about {}.", "Act as an expert on {} and greet a visitor.",
    "Write an outline of a book about {}.",
)  # fmt: skip
QUESTIONS = (
    "Who invented {}?", "When was {} first described?", "What is {} made of?", "Why is {} important?",
    "Where does {} come from?", "How does {} work?", "What is the most famous example of {}?",
    "How many kinds of {} are there?",
)  # fmt: skip
SUBJECTS_DE = (
    "Der Bürgermeister", "Die Polizei", "Ein Sprecher der Firma", "Die Schülerin", "Der Verein", "Die Regierung",
    "Mein Nachbar",
)  # fmt: skip
VERBS_DE = (
    "kündigte am Montag an", "sagte in einem Interview", "berichtete gestern", "bestätigte auf Anfrage",
    "schrieb in einem Brief",
)  # fmt: skip
CLAUSES_DE = (
    "dass die Straße bis zum Herbst gesperrt bleibt", "dass im nächsten Jahr zwei neue Schulen gebaut werden",
    "dass niemand bei dem Unfall verletzt wurde", "dass die Preise für Strom wieder steigen",
    "dass das Konzert wegen des Regens verschoben wird", "dass die Mannschaft einen neuen Trainer sucht",
    "dass die Arbeiten teurer werden als geplant",
)  # fmt: skip
NOTES = {
    "summarise": "Summarize: {}",
    "simpler": "Rewrite this text in simpler words:\n{}",
}
LANGUAGES = ("German", "French", "Spanish")
CODE_TASKS = (
    "Add comments to this code:\n\n{}", "Explain what this code does:\n\n{}",
    "Rewrite this code with better names:\n\n{}", "Add type hints to this function:\n\n{}",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="the folder of the three public sets")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--articles", type=Path, help="data of the target's own articles: writes what is made of them")
    parser.add_argument("--model", default=BUILT_IN, help="the target that wrote the articles (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)
    kinds = _of_articles(options.articles, options.model, chance) if options.articles else _first(options.corpus, chance)
    for kind, prompts in kinds.items():
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in prompts]
        (options.out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{kind}: {len(lines)} prompts")


def _first(corpus: Path, chance: random.Random) -> dict[str, list[Messages]]:
    """All kinds that need no text of the target."""
    problems = [entry["question"] for entry in _lines(corpus / "gsm8k_train.jsonl")]
    programs = _lines(corpus / "mbpp_train.jsonl")
    talks = [entry["messages"] for entry in _lines(corpus / "oasst_prompts.jsonl")]
    answers = [m["content"] for talk in talks for m in talk if m["role"] == "assistant" and _is_prose(m["content"])]
    chance.shuffle(answers)
    half = len(answers) // 2
    return {
        "gsm8k": _asked(chance.sample(problems, 330)),
        "mbpp": _asked(chance.sample([entry["text"] for entry in programs], 220)),
        "functions": _asked(_headers(programs)),
        "code": _asked([chance.choice(CODE_TASKS).format(entry["code"]) for entry in chance.sample(programs, 180)]),
        "oasst": talks,
        "articles": _asked(chance.sample([*_articles()], 190)),
        "tasks": _asked(chance.sample([*_tasks(chance)], 260)),
        "questions": _asked(chance.sample([q.format(s) for q, s in product(QUESTIONS, SUBJECTS)], 216)),
        "german": _asked(chance.sample([*_german()], 140)),
        "reading": _asked([NOTES["summarise"].format(answer) for answer in answers[:half]]),
        "rewriting": _asked([_rewriting(answer, chance) for answer in answers[half:]]),
    }


def _of_articles(data: Path, model: str, chance: random.Random) -> dict[str, list[Messages]]:
    """What is made of articles that the target wrote: summaries, and questions to answer from passages."""
    tokens = Tokens(str(resolve(model, cache_folder(), say=print).path))
    texts = [tokens.decode(row.tokens[row.prompt_length :].tolist()).strip() for row in read_shards(data)]
    chance.shuffle(texts)
    passages = [paragraph for text in texts for paragraph in text.split("\n\n") if len(paragraph) > 200]
    chance.shuffle(passages)
    together = ["\n".join(passages[at : at + 2]) for at in range(0, min(len(passages), 400), 2)]
    questions = (
        "What is the main point of the text above?",
        "Based on the text above, what happened, and where?",
        "Who is named above?",
    )
    return {
        "summaries": _asked([NOTES["summarise"].format(text) for text in texts]),
        "passages": _asked([f"{text}\n\n{chance.choice(questions)}" for text in together]),
        "simpler": _asked([NOTES["simpler"].format(text) for text in passages[400:520]]),
    }


def _headers(programs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The beginnings of functions, with what they are to do as their docstring."""
    for entry in programs:
        name = re.match(r"\w+", entry["test_list"][0].removeprefix("assert "))
        if name and (header := re.search(rf"^def {re.escape(name[0])}\(.*\):", entry["code"], re.MULTILINE)):
            yield f'{header[0]}\n    """{entry["text"].strip()}\n\n    >>> {name[0]}(...)\n    """\n'


def _articles() -> Iterator[str]:
    for event, place in product(EVENTS, PLACES):
        yield f"Write a news article about {event} in {place}."
    for subject in SUBJECTS:
        yield f"Write an encyclopedia article about {subject}."


def _tasks(chance: random.Random) -> Iterator[str]:
    for task, subject in product(TASKS, SUBJECTS):
        yield task.format(subject, chance.choice(SUBJECTS))


def _german() -> Iterator[str]:
    for subject, verb, clause in product(SUBJECTS_DE, VERBS_DE, CLAUSES_DE):
        yield f"Translate German to English: {subject} {verb}, {clause}."


def _rewriting(answer: str, chance: random.Random) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", answer)
    if chance.random() < 0.5:
        return f"Translate English to {chance.choice(LANGUAGES)}: {max(sentences[:5], key=len)}"
    return NOTES["simpler"].format(" ".join(sentences[:5]))


def _is_prose(text: str) -> bool:
    return "```" not in text and 60 <= len(text.split()) <= 350


def _asked(texts: Iterable[str]) -> list[Messages]:
    return [[{"role": "user", "content": text}] for text in texts]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
