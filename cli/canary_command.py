"""``outrider train canary``: text of the target beside a head's weights, on which every start tries the head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import settings_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from services.drafter.heads.canary.noise import GuessBehindNoise
    from services.drafter.heads.canary.texts import CanaryText
    from services.drafter.heads.canary.trial import CanaryTrial
    from services.drafter.heads.canary.verdict import CanaryResult

# Subjects on which models of any size have something to say.
_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


def canary(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a head, streams or Uno's adapter: its configuration and safetensors.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The head's target. Default: the one in its training.json, or the built-in one.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl file as for outrider train data. Default: two questions of our own.")
    ] = None,
    length: Annotated[int, typer.Option(min=16, max=1024, help="Most tokens of an answer.")] = 80,
) -> None:
    """Let the target answer some prompts, and keep the text and its states beside a head's weights.

    From then on every start tries the head on them: a useless one is refused with the likely fault, such as layers that are
    counted another way. The head is tried now, too. Nothing is written if it is refused.
    """
    from transformers import AutoModelForCausalLM

    from cluster.models.target import as_float32, resolve
    from services.api.messages import ChatMessage
    from services.drafter.heads.canary.texts import TEXTS, layers_to_record, record_texts, save_texts
    from services.drafter.heads.files.target_rows import read_target_shape
    from services.drafter.heads.files.target_shape import recorded_target
    from services.model_files.folder import reading
    from services.router.tokens import Tokens
    from training.prompt_files import read_prompts

    asked: list[tuple[ChatMessage, ...]] = [(ChatMessage(role="user", content=each),) for each in _QUESTIONS]
    if prompts is not None:
        asked = [each.messages for each in read_prompts([prompts])]
    loaded = settings_of(None, None, model=model or recorded_target(folder))
    resolved = resolve(loaded.model, loaded.cache_dir, say=_say)
    target = resolved.path
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ConfigurationError("has no config.json", field=folder, allowed="the folder of a head")
    trial, shape, tokens = _trial(folder, resolved), read_target_shape(target), Tokens(str(target))
    encoded = [
        tokens.encode_chat(messages) if tokens.has_chat_template else tokens.encode(messages[-1].content)
        for messages in asked
    ]
    with reading(f"load the target at {target}", about=target):
        teacher = AutoModelForCausalLM.from_pretrained(as_float32(target, say=_say), attn_implementation="sdpa")
    with stderr().status("the target writes"):
        texts = record_texts(teacher, encoded, layers_to_record(trial.layers, shape), length)
    del teacher
    found = trial.check(texts)
    save_texts(texts, folder / TEXTS)
    stdout().print(
        f"{folder / TEXTS}: {found.guesses} guesses; the target chose {found.first:.0%} of the first ones and "
        f"{found.second:.0%} of the second",
        soft_wrap=True,
    )


def _trial(folder: Path, target: ResolvedModel) -> CanaryTrial:
    """The trial of a checkpoint; of Uno's adapter, in passes of the target itself.

    Raises:
        ConfigurationError: it cannot draft for the target.
    """
    from services.drafter.heads.canary.noise import NoiseTrial
    from services.drafter.heads.canary.trial import CanaryTrial, open_trial
    from services.drafter.heads.files.kinds import inspect
    from services.drafter.heads.files.target_rows import read_target_shape

    if not inspect(folder, target.path).in_target:
        return open_trial(folder, target.path)

    def check(texts: Sequence[CanaryText]) -> CanaryResult:
        trial = NoiseTrial(folder, target.path)
        with _passes_over_noise(folder, target, max(len(text.tokens) for text in texts)) as guess:
            return trial.check(guess, texts, read_target_shape(target.path), str(folder))

    return CanaryTrial((), check)


@contextmanager
def _passes_over_noise(folder: Path, target: ResolvedModel, length: int) -> Iterator[GuessBehindNoise]:
    """The target with Uno's adapter in ``folder``, for texts of at most ``length`` tokens."""
    from cluster.settings.component_configs import verifier_config
    from cluster.settings.config import load
    from services.verifier.checks.noise_guesses import guess_behind_noise
    from services.verifier.model.target import TransformersTarget

    # Room for the noise as well.
    room = f"verifier.kv_cache_tokens={length + 128}"
    alone = ("verifier.stages=1", "verifier.tensor_parallel_size=1", "verifier.max_model_len=null")
    settings = load(flags=[f"model={target.name}", f"drafter.models={json.dumps([str(folder)])}", room, *alone])
    passes = TransformersTarget(verifier_config(settings, target).target)
    try:
        yield partial(guess_behind_noise, passes)
    finally:
        passes.shutdown()


def _say(remark: str) -> None:
    stderr().print(remark, markup=False, soft_wrap=True)
