"""Compares models that draft, along recorded answers of their target: streams, Medusa's heads, draft models, heads.

    outrider bench --prompts FILE --strategies autoregressive --out results
    python -m lab.ahead_models --traces results --models FOLDER FOLDER ... [--nodes 15,31] [--prune 0.001,0.01]

Greedy, one request at a time, each model alone with trees of a fixed size, every draft waited for; so this shows what models
guess and what a draft takes, not how fast a server is. Streams come in the paper's form: the target's own pass has computed
those of the row where it ended, and the drafter is left with the output layer; drafted in two steps, as a row of its own.
"calls" is plain decoding's number of passes over what is left of them. With --prune, real passes show what early-exit
pruning would drop, for streams that have an early exit (recipe: pruning_rank).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.replay.replay import read_traces
from cluster.models.target import BUILT_IN, resolve
from lab.known_texts import KnownText, ReplayedTexts, States, read_states, replay_texts
from lab.tree_pruning import PrunedAt, edges_of, prune_at
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.files.kinds import Checkpoint, inspect
from services.drafter.heads.levels import LevelForm
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.source import MedusaSource
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.source import StreamSource
from services.drafter.heads.streams.streams import Streams
from services.drafter.heads.streams.whole_texts import streams_of
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import ModelSource
from services.machine.processor import cache_folder
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError

_MIB = 1 << 20
_WINDOW = 2048
# Texts that are drafted for in two steps, for the time that it takes: the drafts are those of one pass.
_FEW = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInReplay:
    """A model in the comparison.

    Attributes:
        streams: it is streams, in the target's own pass.
        levels: tokens ahead that it guesses at once; 0: one after the other.
        make: a new source that uses so many levels; None: all.
        trained: numbers that were trained.
        fixed: a new source that grows Medusa's fixed tree, where the model is Medusa's heads.
    """

    name: str
    checkpoint: Checkpoint
    streams: Streams | None
    levels: int
    make: Callable[[int | None], ModelSource]
    trained: int | None
    fixed: Callable[[], ModelSource] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states are reported to it."""
        return self.checkpoint.layers if self.streams is None else self.checkpoint.layers_in_pass

    def texts(self, known: Sequence[KnownText]) -> list[tuple[KnownText, States | None]]:
        """The texts, each with what the target reports."""
        return [(text, self._reported(text)) for text in known]

    @torch.inference_mode()
    def _reported(self, text: KnownText) -> States | None:
        if self.streams is not None:
            states = torch.from_numpy(text.states[self.streams.config.state_layer]).float()[None]
            made = streams_of(self.streams, states, torch.arange(states.shape[1])[None])[0]
            return made.flatten(1).half().numpy()
        if not self.layers:
            return None
        return np.concatenate([text.states[layer] for layer in self.layers], axis=1)


def find_models(folders: Sequence[Path], target: Path) -> list[ModelInReplay]:
    """The models in these folders; streams a second time, in two steps.

    Raises:
        ConfigurationError: a folder holds no drafter's weights, or another target's.
    """
    return [_find_model(inspect(folder.expanduser().resolve(), target), target) for folder in folders]


def _find_model(checkpoint: Checkpoint, target: Path) -> ModelInReplay:
    folder, source = checkpoint.folder, checkpoint.source
    streams, levels, trained, fixed = None, 0, None, None
    make: Callable[[int | None], ModelSource]
    # Those that guess by levels are loaded once for all numbers of levels, and without their canary.
    if source == "streaming":
        module = streams = load_streams(folder, target)
        levels, trained = module.config.num_streams, sum(each.numel() for _, each in module.trained())
        make = lambda depth: StreamSource(module, window=_WINDOW, form=LevelForm(depth=depth))  # noqa: E731
    elif source == "medusa":
        heads = load_medusa(folder, target)
        levels, trained = heads.config.num_heads, sum(each.numel() for each in heads.parameters())
        make = lambda depth: MedusaSource(heads, form=LevelForm(depth=depth))  # noqa: E731
        fixed = lambda: MedusaSource(heads, form=LevelForm(fixed="mc_sim_7b_63"))  # noqa: E731
    else:
        config = TrainedConfig(checkpoints={source: folder}, asked_for=False, target=target, window=_WINDOW)
        made = make_source(source, DrafterConfig(trained=config))
        make = lambda depth: made  # type: ignore[assignment, return-value]  # noqa: E731
    return ModelInReplay(
        name=folder.name, checkpoint=checkpoint, streams=streams, levels=levels, make=make, trained=trained, fixed=fixed
    )


def compare_models(
    models: Sequence[ModelInReplay], known: Sequence[KnownText], nodes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One record for each model, number of levels and size of trees."""
    for model in models:
        texts = model.texts(known)
        for levels in [*range(1, model.levels), None] if model.levels else [None]:
            for size in nodes:
                result = replay_texts(model.make(levels), texts, model.layers, size)
                form = "one pass" if model.streams else ""
                yield _record(model, levels or model.levels, size, form, result, texts)
        if model.fixed is not None:
            for size in nodes:
                result = replay_texts(model.fixed(), texts, model.layers, size)
                yield _record(model, model.levels, size, "fixed tree", result, texts)
        if model.streams is not None:
            own = replace(model, streams=None)
            few = own.texts(known[:_FEW])
            result = replay_texts(own.make(None), few, own.layers, nodes[-1])
            yield _record(model, model.levels, nodes[-1], f"two steps, {_FEW} texts", result, few)


def _record(
    model: ModelInReplay,
    levels: int,
    nodes: int,
    form: str,
    result: ReplayedTexts,
    texts: Sequence[tuple[KnownText, States | None]],
) -> dict[str, Any]:
    times = sorted(result.drafting_s)
    return {
        "model": model.name,
        "source": model.checkpoint.source,
        "form": form,
        "levels": levels,
        "nodes": nodes,
        "tau": result.tau,
        "tau_by_task": result.tau_by_task([text.trace.task for text, _ in texts]),
        "call_reduction": result.call_reduction,
        "draft_ms": 1e3 * statistics.median(times),
        "draft_ms_low": 1e3 * times[len(times) // 10],
        "trained": model.trained,
        "stream_layers": model.streams.config.num_layers if model.streams else None,
        "memory_mib": model.checkpoint.bytes_in("float32") / _MIB,
    }


def prune_models(
    models: Sequence[ModelInReplay],
    known: Sequence[KnownText],
    nodes: Sequence[int],
    thresholds: Sequence[float],
    target: TransformersTarget,
) -> Iterator[tuple[str, int, list[PrunedAt]]]:
    """What each threshold would do, 0 first, by model and size of trees; of models with an early exit."""
    for model in models:
        streams = model.streams
        if streams is None or streams.pruning is None:
            continue
        texts, config = model.texts(known), streams.config
        for size in nodes:
            steps = replay_texts(model.make(None), texts, model.layers, size).steps
            edges = edges_of(target, known, steps, streams)
            sizes = config.target_layers, config.num_layers, config.num_streams
            yield model.name, size, [prune_at(below, edges, *sizes) for below in (0.0, *thresholds)]


def show_record(record: dict[str, Any]) -> str:
    """One line of a Markdown table."""
    form = f" ({record['form']})" if record["form"] else ""
    trained = "" if record["trained"] is None else f"{record['trained']:,}"
    return (
        f"| {record['model']}{form} | {record['stream_layers'] or ''} | {record['levels'] or ''} | {record['nodes']} "
        f"| {record['tau']:.2f} | {record['call_reduction']:.2f} | {record['draft_ms']:.1f} ({record['draft_ms_low']:.1f}) "
        f"| {trained} | {record['memory_mib']:.0f} |"
    )


def by_task(records: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of tokens per pass by task, of each model as it is served."""
    whole = [each for each in records if each["form"] in ("", "one pass") and each["levels"] == _most_levels(records, each)]
    tasks = sorted({task for each in whole for task in each["tau_by_task"]})
    lines = ["", f"| model, nodes | all | {' | '.join(tasks)} |", f"|---|{'---|' * (len(tasks) + 1)}"]
    for each in whole:
        taus = " | ".join(f"{each['tau_by_task'][task]:.2f}" for task in tasks)
        lines.append(f"| {each['model']}, {each['nodes']} | {each['tau']:.2f} | {taus} |")
    return "\n".join(lines)


def _most_levels(records: Sequence[dict[str, Any]], of: dict[str, Any]) -> int:
    """The most levels of a model's records."""
    return max(int(each["levels"]) for each in records if each["model"] == of["model"])


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")] if text else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN, help="the target; default: the built-in one")
    parser.add_argument("--traces", type=Path, required=True, help="folder of outrider bench, or its file of traces")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of weights that draft")
    parser.add_argument("--nodes", default="15,31", help="sizes of trees, comma-separated")
    parser.add_argument("--prune", default="", help="thresholds of early-exit pruning, comma-separated")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    try:
        nodes, thresholds = [int(each) for each in _numbers(arguments.nodes)], _numbers(arguments.prune)
    except ValueError:
        parser.error("--nodes and --prune must be numbers, comma-separated")
    if not nodes or min(nodes) < 1 or not all(0 < below < 1 for below in thresholds):
        parser.error("--nodes must be at least 1, and --prune between 0 and 1")
    try:
        _run(arguments, nodes, thresholds)
    except ConfigurationError as error:
        parser.error(str(error))


def _run(arguments: argparse.Namespace, nodes: list[int], thresholds: list[float]) -> None:
    folder = resolve(arguments.model, cache_folder(), say=print).path
    traces, models = read_traces(arguments.traces), find_models(arguments.models, folder)
    layers = sorted({layer for model in models for layer in model.checkpoint.layers})
    longest = max(len(trace.prompt) + len(trace.output) for trace in traces) + max(nodes) + 1
    config = TargetConfig(
        model_path=str(folder),
        threads=arguments.threads,
        kv_cache_tokens=max(2048, longest),
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    target = TransformersTarget(config)
    known = [read_states(target, trace, layers) for trace in traces]
    torch.set_num_threads(arguments.threads)
    print("| model | Ns | levels | nodes | tokens per pass | calls | ms per draft, median (lowest tenth) | trained | MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    records = []
    for record in compare_models(models, known, nodes):
        records.append(record)
        print(show_record(record), flush=True)
    print(by_task(records))
    pruned = []
    for name, size, found in prune_models(models, known, nodes, thresholds, target) if thresholds else ():
        pruned += [{"model": name, "nodes": size, **asdict(each)} for each in found]
        for each in found:
            print(
                f"{name}, {size} nodes, below {each.below:g}: {each.dropped:.1%} of the nodes dropped, {each.tau:.3f} "
                f"tokens per pass, {each.lost_drafts:.1%} of the drafts lost, {each.work:.1%} of the work",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"models": records, "pruned": pruned}, indent=1))


if __name__ == "__main__":
    main()
