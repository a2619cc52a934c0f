"""``outrider train``: data, training, evaluation and export of drafters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from training.generate import DataProgress
    from training.interruption import Interruption
    from training.observed_target import ObservedTarget

app = typer.Typer(
    no_args_is_help=True,
    help="Make drafters for a target: its own text as data, training, evaluation, export.",
    epilog="Try: outrider train data --out my-data --max-minutes 30, then: outrider train vocabulary --data my-data",
)

_REFRESH_S = 0.5
# Between two lines where the progress goes to a file.
_LINE_EVERY_S = 60.0
# Prompts that the target makes where no file is given.
_OWN_PROMPTS = 1000


@app.command()
def data(
    out: Annotated[Path, typer.Option("--out", help="Folder for the data; continues an interrupted run.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A file of prompts; outrider bench --help names the forms. Repeatable.")
    ] = None,
    given: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of prompts with answers: the target reads these, and writes none. Conversations, or a field such "
            "as answer (GSM8K), code (MBPP), highlights (CNN/DM) or summary (DialogSum). Repeatable."
        ),
    ] = None,
    own_prompts: Annotated[
        int | None, typer.Option(min=0, help="Prompts that the target makes itself. Default: 1000 if no file is given.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The target model. Default: the built-in one.")] = None,
    max_minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so long; the next run goes on.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Answers in all. Default: all there are.")] = None,
    samples: Annotated[int, typer.Option(help="Answers to each prompt: one greedy, the others at temperature 1.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 192,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 1024,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe that will learn from the data, such as eagle3 or block: the states that it reads are kept. "
            "Repeatable. Default: what fspad, eagle, medusa, streams and draft_model read."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose hidden states are kept, comma-separated, instead; -1: after the final norm."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 64,
    shard_sequences: Annotated[int, typer.Option(help="Sequences in one file.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the order of prompts and of the sampled answers.")] = 0,
    device: Annotated[str | None, typer.Option(help="Device of the target: cpu or cuda.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting of the target. Repeatable.")] = None,
) -> None:
    """Let the target write the answers from which drafters learn, and keep its hidden states.

    Data are made once for all recipes that you name: --recipe fspad --recipe eagle3 --recipe block. A state takes two bytes
    a number: 1,152 bytes a token and layer where the hidden size is 576.

    One of the first two answers to a prompt is greedy, all others are sampled at temperature 1. 3 % of the prompts are
    held out for validation. Answers of --given files are read as they stand, once each: over them a drafter learns the
    target's distributions, as EAGLE and FSPAD were trained. A run that was interrupted goes on where it stopped, with the
    same tokens.
    """
    from cluster.checks.host import check_folder
    from cluster.models.target import resolve
    from cluster.settings.component_configs import verifier_config
    from cluster.settings.config import load
    from services.drafter.heads.files.target_shape import read_target_shape
    from training.data_folder import DataOptions, check_data_folder
    from training.interruption import Interruption
    from training.make_data import make_data
    from training.recipe import load_recipe
    from training.state_columns import layers_of

    if layers is not None and recipe:
        raise ConfigurationError(
            "--layers says what --recipe would", field="--layers", verb="", value=layers, allowed="alone"
        )
    recipes = [load_recipe(name) for name in recipe or ()]
    options = DataOptions(
        layers=_layers("-1" if layers is None else layers), max_new_tokens=max_new_tokens, samples=samples,
        max_prompt_tokens=max_prompt_tokens, shard_sequences=shard_sequences, seed=seed, sequences=sequences,
        concurrency=concurrency,
        own_prompts=own_prompts if own_prompts is not None else 0 if prompts or given else _OWN_PROMPTS,
    )  # fmt: skip
    check_folder("--out", out)
    check_data_folder(out)
    named = [f"{key}={value}" for key, value in (("model", model), ("verifier.device", device)) if value is not None]
    loaded = load(flags=[*(settings or []), *named])
    resolved = resolve(loaded.model, loaded.cache_dir, say=stderr().print)
    config = verifier_config(loaded, resolved).target
    if recipes:
        options = replace(options, layers=layers_of(recipes, read_target_shape(resolved.path)))

    async def make() -> DataProgress:
        interruption = Interruption(None if max_minutes is None else 60 * max_minutes)
        interruption.stop_on_signals()

        def show(progress: DataProgress, target: ObservedTarget) -> _Shown:
            return _shown(progress, target, interruption)

        return await make_data(out, prompts or [], given or [], options, resolved.name, config, interruption, show, _say)

    progress = asyncio.run(make())
    rest = "" if progress.done == progress.total else "; the same command goes on"
    speed = f"{progress.tokens:,} new tokens, {progress.tokens / progress.seconds:,.0f} tokens/s"
    stdout().print(f"{out}: {progress.done:,} of {progress.total:,} {progress.stage}, {speed}{rest}", soft_wrap=True)


@app.command()
def vocabulary(
    folder: Annotated[Path, typer.Option("--data", help="Folder of outrider train data.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the vocabulary. Default: the data's.")] = None,
    size: Annotated[int, typer.Option(help="Tokens that a drafter can propose.")] = 16384,
) -> None:
    """Choose the tokens that a drafter can propose: those that are frequent in the data's answers, and the lowest ids.

    Prints which share of the held-out answers they cover: more than that no drafter with this vocabulary can get accepted.
    """
    from rich.table import Table

    from training.vocabulary import build_vocabulary, write_vocabulary

    chosen = build_vocabulary(folder, size)
    write_vocabulary(out or folder, chosen)
    table = Table("held-out answers", "recall")
    for domain, recall in chosen.record.recall.items():
        table.add_row(domain, f"{recall:.4f}")
    stdout().print(table if chosen.record.recall else "no held-out answers yet: no recall")
    stdout().print(f"{out or folder}: {size:,} tokens, from {chosen.record.counted:,} tokens of answers", soft_wrap=True)


@app.command()
def convert(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a public head or draft model: config.json and pytorch_model.bin.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to. Default: beside the pickle.")] = None,
    model: Annotated[str | None, typer.Option(help="The target, to check that they go together.")] = None,
    layer_ids: Annotated[
        Literal["hidden_states", "layers"] | None,
        typer.Option(
            help="How config.json counts EAGLE-3's layers: as transformers' hidden_states (vLLM), or as layers (SpecForge, "
            "SGLang). Default: by the layout."
        ),
    ] = None,
) -> None:
    """Make safetensors of a head or a draft model that is published as a pickle, once. Nothing but tensors is read from it.

    A server opens no pickles: they can hold programs.
    """
    from cluster.models.target import resolve
    from cluster.settings.config import load
    from training.convert_pickles import convert as convert_pickles

    target = None if model is None else resolve(model, load().cache_dir, say=_say).path
    written = convert_pickles(folder, out, target=target, layer_ids=layer_ids)
    stdout().print(f"{written}: ready; name it in drafter.models", soft_wrap=True)


def _say(remark: str) -> None:
    stderr().print(remark, markup=False, soft_wrap=True)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(
            field="--layers", verb="", value=text, allowed="whole numbers, such as -1 or 1,14,26"
        ) from error


_Shown = AbstractAsyncContextManager[None]


@asynccontextmanager
async def _shown(progress: DataProgress, target: ObservedTarget, interruption: Interruption) -> AsyncIterator[None]:
    """Show a stage's progress during the block: a bar on a terminal, else a line every minute."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = stderr()
    rows_before = target.observed_rows

    def line() -> str:
        left = [each for each in (progress.seconds_left, interruption.seconds_left) if each is not None]
        return (
            f"{progress.done:,}/{progress.total:,} {progress.stage}, "
            f"{(target.observed_rows - rows_before) / progress.seconds:,.0f} rows/s, "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s, {_clock(min(left)) if left else '?'} left"
        )

    if console.is_terminal:
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(line(), total=progress.total)
            async with _repeating(_REFRESH_S, lambda: bars.update(task, completed=progress.done, description=line())):
                yield
    else:
        async with _repeating(_LINE_EVERY_S, lambda: console.print(line(), soft_wrap=True)):
            yield


@asynccontextmanager
async def _repeating(seconds: float, call: Callable[[], None]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            call()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
