"""Whether DISCO's classifier (arXiv 2405.04304) holds for other prompts than it learnt from: F1 by kind, and between kinds.

    python -m lab.stop_transfer --data DATA --draft FOLDER --group code=mbpp,functions,code --group maths=gsm8k

DATA is a folder of ``outrider train data``; a kind is a file of its prompts, a group several of them. The draft model drafts
along the greedy answers once. Of each kind every fourth answer is judged, and the others are learnt from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.models.drafters import by_kernels
from cluster.models.target import BUILT_IN, resolve
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.draft_model.source import NAME, make
from services.drafter.stopping.classifier import Classifier
from services.machine.processor import cache_folder
from training.disco import DiscoRecipe, choose, quality, train_classifier
from training.shards import read_shards
from training.stop_examples import KnownAnswer, ProbedAnswer, chain_examples, judged_examples, probe

_JUDGED_ONE_IN = 4
_LONGEST, _BEYOND = 48, 6
ALL = "all"

Answers = Mapping[str, Sequence[ProbedAnswer]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of outrider train data")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--group", action="append", default=[], help="NAME=KIND,KIND; repeatable")
    parser.add_argument("--model", default=BUILT_IN, help="the target (default: %(default)s)")
    parser.add_argument("--cost-ratio", type=float, default=0.25, help="a pass of the draft model over one of the target")
    options = parser.parse_args()
    answers = probed(options.data, options.draft, options.model)
    groups = {name: kinds.split(",") for name, _, kinds in (each.partition("=") for each in options.group)}
    learnt = {ALL: [*answers], **groups}
    judges = {name: _trained(answers, kinds, options.cost_ratio) for name, kinds in learnt.items()}
    print("| judged on | answers | tokens | " + " | ".join(f"learnt from {name}" for name in judges) + " |")
    print("|---|---:|---:|" + "---:|" * len(judges))
    rows = [*((f"all of {name}", kinds) for name, kinds in groups.items()), *((kind, [kind]) for kind in sorted(answers))]
    for name, kinds in [*rows, (ALL, [*answers])]:
        held = [answer for kind in kinds for answer in _judged(answers[kind])]
        examples = judged_examples(held)
        found = [quality(classifier, examples, theta) for classifier, theta in judges.values()]
        told = " | ".join(f"{100 * each.f1:.0f} ({100 * each.auc:.0f})" for each in found)
        print(f"| {name} | {len(held)} | {len(examples.labels)} | {told} |")
    print("F1 of C >= theta in %, in brackets the area under the ROC curve; theta: " + _thetas(judges))


def probed(data: Path, draft: Path, model: str) -> Answers:
    """The greedy answers of both splits by kind, with what the draft model said along them."""
    target = resolve(model, cache_folder(), say=print).path
    trained = TrainedConfig(checkpoints={NAME: draft}, target=target, eagle_topk=1, draft_kernels=by_kernels)
    source = make(DrafterConfig(trained=trained))
    by_kind: dict[str, list[KnownAnswer]] = {}
    for each in read_shards(data):
        if each.temperature == 0:
            tokens = each.tokens.tolist()
            answer = KnownAnswer(prompt=tuple(tokens[: each.prompt_length]), answer=tuple(tokens[each.prompt_length :]))
            by_kind.setdefault(each.domain, []).append(answer)
    return {kind: probe(source.with_stop, NAME, known, longest=_LONGEST, beyond=_BEYOND) for kind, known in by_kind.items()}


def _judged(answers: Sequence[ProbedAnswer]) -> Sequence[ProbedAnswer]:
    return answers[::_JUDGED_ONE_IN]


def _trained(answers: Answers, kinds: Sequence[str], c: float) -> tuple[Classifier, float]:
    """A classifier of some kinds, and the theta that costs least on what it learnt from. A sixth chooses the best step."""
    learnt = [each for kind in kinds for at, each in enumerate(answers[kind]) if at % _JUDGED_ONE_IN]
    watched = learnt[::6]
    rest = [each for at, each in enumerate(learnt) if at % 6]
    classifier = train_classifier(chain_examples(rest), chain_examples(watched), DiscoRecipe())
    return classifier, choose(learnt, classifier, c).theta


def _thetas(judges: Mapping[str, tuple[Classifier, float]]) -> str:
    return ", ".join(f"{name} {theta}" for name, (_, theta) in judges.items())


if __name__ == "__main__":
    main()
