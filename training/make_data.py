"""``outrider train data`` from its options to the finished folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from services.router.tokens import Tokens
from services.verifier.config import TargetConfig
from speculation.errors import ConfigurationError, InvalidArgument
from training.data_folder import DataOptions, encode_prompts, open_folder, short_enough, target_of, wanted_manifest
from training.generate import DataProgress, DataRun
from training.interruption import Interruption
from training.observed_target import ObservedTarget, load_target, plain_decoding
from training.own_prompts import OwnPrompts, end_of_turn, turn_frame
from training.prompt_files import read_prompts
from training.tasks import tasks_of

# Rows of cache per request that are enough for nearly all prompts; longer ones wait until others end.
_USUAL_ROWS = 448

# Shows a stage's progress during a block.
Show = Callable[[DataProgress, ObservedTarget], AbstractAsyncContextManager[None]]


async def make_data(
    out: Path,
    files: Sequence[Path],
    given: Sequence[Path],
    options: DataOptions,
    model: str,
    config: TargetConfig,
    interruption: Interruption,
    show: Show,
    say: Callable[[str], None],
) -> DataProgress:
    """Make what is missing in the folder ``out``. Returns the progress of the last stage, complete unless interrupted.

    Args:
        files: of prompts; may be empty if the options ask for the target's own.
        given: files of prompts with answers, which the target reads.
        model: the target's name, for the manifest.
        say: takes remarks.

    Raises:
        ConfigurationError: the prompts, the folder or the model cannot be used, or the disk is full; says why.
        OutriderError: the target failed.
    """
    folder = Path(config.model_path)
    tokens = Tokens(config.model_path)
    frame = turn_frame(tokens) if options.own_prompts else None
    turn = end_of_turn(tokens)
    end = turn or ({tokens.end_of_turn} if tokens.end_of_turn is not None else set())
    encoded = encode_prompts(read_prompts(files, given), tokens, options.max_new_tokens, end)
    target, worker = load_target(_roomy(config, options))
    try:
        _check_layers(target, options.layers)
        identity = target_of(model, folder, target.eos_token_ids | turn)
        async with plain_decoding(target, worker, options.concurrency) as loop:
            if frame is not None:
                ends = target.eos_token_ids
                own = OwnPrompts(out, identity.weights_sha256, frame, options.own_prompts, options.seed, ends)
                async with show(own.progress, target):
                    if not await interruption.run(own.work(loop, options.concurrency)):
                        return own.progress
                encoded += own.prompts()
                if not encoded:
                    raise ConfigurationError(
                        field="--prompts",
                        value="missing",
                        given=(
                            f"and none of the {options.own_prompts} messages that the model wrote ended by itself; give a "
                            "file of prompts"
                        ),
                    )
            fitting = short_enough(encoded, options, target.max_model_len)
            if len(fitting) < len(encoded):
                say(f"{len(encoded) - len(fitting)} of {len(encoded)} prompts are left out: they are too long")
            manifest, faults = open_folder(out, wanted_manifest(identity, options, fitting))
            for fault in faults:
                say(fault)
            tasks = tasks_of(fitting, options.samples, options.seed)[: options.sequences]
            run = DataRun(out, manifest, tasks, target)
            async with show(run.progress, target):
                await interruption.run(run.work(loop, options.concurrency))
            return run.progress
    finally:
        worker.shutdown()
        target.shutdown()


def _check_layers(target: ObservedTarget, layers: Sequence[int]) -> None:
    try:
        target.check_layers(layers)
    except InvalidArgument as error:
        raise ConfigurationError(field="--layers", verb="", value=error.value, allowed=error.allowed) from error


def _roomy(config: TargetConfig, options: DataOptions) -> TargetConfig:
    """The target's settings, with a cache in which nearly all requests fit. Every prompt is computed, for its states."""
    longest = options.max_prompt_tokens + options.max_new_tokens
    rows = max(2 * longest, options.concurrency * min(longest, _USUAL_ROWS))
    return replace(config, kv_cache_tokens=rows, max_model_len=None, enable_prefix_caching=False)
