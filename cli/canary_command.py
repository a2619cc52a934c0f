"""``outrider train canary``: text of the target beside a head's weights, on which every start tries the head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

# Subjects on which models of any size have something to say.
_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


def canary(
    folder: Annotated[Path, typer.Argument(help="Folder of a head or streams: config.json and safetensors, of any layout.")],
    model: Annotated[str | None, typer.Option(help="The head's target. Default: the built-in one.")] = None,
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
    from cluster.settings.config import load
    from services.api.messages import ChatMessage
    from services.drafter.heads.canary.texts import TEXTS, layers_to_record, record_texts, save_texts
    from services.drafter.heads.canary.trial import open_trial
    from services.drafter.heads.files.target_rows import read_target_shape
    from services.model_files.folder import reading
    from services.router.tokens import Tokens
    from training.prompt_files import read_prompts

    asked: list[tuple[ChatMessage, ...]] = [(ChatMessage(role="user", content=each),) for each in _QUESTIONS]
    if prompts is not None:
        asked = [each.messages for each in read_prompts([prompts])]
    loaded = load(flags=[] if model is None else [f"model={model}"])
    target = resolve(loaded.model, loaded.cache_dir, say=_say).path
    if not (folder / "config.json").is_file():
        raise ConfigurationError("has no config.json", field=folder, allowed="the folder of a head")
    trial, shape, tokens = open_trial(folder, target), read_target_shape(target), Tokens(str(target))
    encoded = [
        tokens.encode_chat(messages) if tokens.has_chat_template else tokens.encode(messages[-1].content)
        for messages in asked
    ]
    with reading(f"load the target at {target}", about=target):
        teacher = AutoModelForCausalLM.from_pretrained(as_float32(target, say=_say), attn_implementation="sdpa")
    with stderr().status("the target writes"):
        texts = record_texts(teacher, encoded, layers_to_record(trial.layers, shape), length)
    found = trial.check(texts)
    save_texts(texts, folder / TEXTS)
    stdout().print(
        f"{folder / TEXTS}: {found.guesses} guesses; the target chose {found.first:.0%} of the first ones and "
        f"{found.second:.0%} of the second",
        soft_wrap=True,
    )


def _say(remark: str) -> None:
    stderr().print(remark, markup=False, soft_wrap=True)
