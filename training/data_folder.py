"""Prepares a run of ``outrider train data``: prompts as tokens, the target's identity, and the folder of an earlier run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.model_files.folder import read_json, text_config, tokenizer_digest
from services.router.tokens import Tokens
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from training.data_manifest import FILE, DataManifest, DataSampling, DataTarget, read_data_manifest, write_manifest
from training.generate import UNDER_WAY
from training.own_prompts import FILE as OWN_PROMPTS
from training.prompt_files import EncodedPrompt, TrainingPrompt
from training.shards import fault_of

_READ = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """What is made.

    Attributes:
        layers: whose hidden states are kept; numbered as in ``Features.layers``.
        max_new_tokens: most tokens of an answer.
        samples: answers to each prompt.
        max_prompt_tokens: longer prompts are left out.
        shard_sequences: sequences in a shard.
        seed: of the order of the tasks and of their noise.
        own_prompts: how many prompts the target makes itself, besides those of files.
        sequences: how many are made at most; None: ``samples`` of each prompt.
        concurrency: requests decoded at a time.

    Raises:
        ConfigurationError: a value is out of range; names the command-line option.
    """

    layers: tuple[int, ...] = (-1,)
    max_new_tokens: int = 192
    samples: int = 4
    max_prompt_tokens: int = 1024
    shard_sequences: int = 64
    seed: int = 0
    own_prompts: int = 0
    sequences: int | None = None
    concurrency: int = 64

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max-new-tokens", self.max_new_tokens, 2, 8192),
            ("samples", self.samples, 1, 1000),
            ("max-prompt-tokens", self.max_prompt_tokens, 1, limits.MAX_SESSION_TOKENS),
            ("shard-sequences", self.shard_sequences, 1, 4096),
            ("seed", self.seed, 0, limits.MAX_UINT64),
        ):
            if not low <= value <= high:
                raise ConfigurationError(field=f"--{name}", verb="", value=value, allowed=f"from {low} to {high}")
        if not 1 <= len(self.layers) <= limits.MAX_LAYERS:
            raise ConfigurationError(
                field="--layers", verb="names", value=f"{len(self.layers)} layers", allowed=f"1 to {limits.MAX_LAYERS}"
            )


def encode_prompts(
    prompts: Iterable[TrainingPrompt], tokens: Tokens, longest: int = 0, end: Iterable[int] = ()
) -> list[EncodedPrompt]:
    """The prompts as token ids. Without a chat template, the text of the last message is the prompt.

    Args:
        longest: most tokens of an answer that is given; a longer one is cut off.
        end: ends an answer that is given, where there is one such token.

    Raises:
        ConfigurationError: the chat template refuses a conversation; names its file and line.
    """
    found = []
    chat = tokens.has_chat_template
    for prompt in prompts:
        try:
            ids = tokens.encode_chat(prompt.messages) if chat else tokens.encode(prompt.messages[-1].content)
        except InvalidArgument as error:
            raise ConfigurationError(f"{error}", field=prompt.where) from error
        answer = () if prompt.answer is None else (*tokens.encode_answer(prompt.answer), *sorted(end)[:1])[:longest]
        found.append(EncodedPrompt(domain=prompt.domain, digest=prompt.digest, tokens=ids, answer=answer))
    return found


def short_enough(prompts: Sequence[EncodedPrompt], options: DataOptions, max_model_len: int) -> list[EncodedPrompt]:
    """The prompts that may be used: a longest answer must fit behind them.

    Raises:
        ConfigurationError: there are none.
    """
    most = min(options.max_prompt_tokens, max_model_len - options.max_new_tokens)
    found = [prompt for prompt in prompts if len(prompt.tokens) <= most]
    if not found:
        raise ConfigurationError(
            f"no prompt has at most {most} tokens: raise --max-prompt-tokens, or lower --max-new-tokens "
            f"(the model has room for {max_model_len} tokens in all)",
            about="--max-prompt-tokens",
        )
    return found


def target_of(name: str, folder: Path, eos_token_ids: Iterable[int]) -> DataTarget:
    """The identity of a model: hashes of its configuration, weights and tokenizer.

    Raises:
        ConfigurationError: a file cannot be read, or config.json does not name the sizes.
    """
    config = text_config(read_json(folder / "config.json"))
    sizes = config.get("vocab_size"), config.get("hidden_size", config.get("n_embd"))
    if not all(isinstance(size, int) for size in sizes):
        raise ConfigurationError(
            f"{folder}/config.json names no vocab_size or no hidden_size", about=f"{folder}/config.json"
        )
    return DataTarget(
        name=name,
        weights_sha256=weights_digest(folder),
        tokenizer_sha256=tokenizer_digest(folder),
        vocab_size=sizes[0],
        hidden_size=sizes[1],
        eos_token_ids=tuple(sorted(eos_token_ids)),
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 over config.json and all weight files, by name.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(file.name.encode() + b"\0")
        try:
            with file.open("rb") as content:
                while block := content.read(_READ):
                    digest.update(block)
        except OSError as error:
            raise ConfigurationError(f"cannot be read ({error.strerror})", field=file) from error
    return digest.hexdigest()


def wanted_manifest(target: DataTarget, options: DataOptions, prompts: Sequence[EncodedPrompt]) -> DataManifest:
    """The manifest of a run that has not begun."""
    digest = hashlib.sha256("\n".join(map(_line, prompts)).encode())
    return DataManifest(
        target=target,
        layers=options.layers,
        sampling=DataSampling(
            max_new_tokens=options.max_new_tokens,
            samples_per_prompt=options.samples,
            max_prompt_tokens=options.max_prompt_tokens,
            shard_sequences=options.shard_sequences,
            seed=options.seed,
        ),
        domains=tuple(dict.fromkeys(prompt.domain for prompt in prompts)),
        given=tuple(dict.fromkeys(prompt.domain for prompt in prompts if prompt.answer)),
        prompts=len(prompts),
        prompts_sha256=digest.hexdigest(),
    )


def _line(prompt: EncodedPrompt) -> str:
    answer = f" {hashlib.sha256(str(prompt.answer).encode()).hexdigest()}" if prompt.answer else ""
    return f"{prompt.domain} {prompt.digest}{answer}"


def _unfinished(out: Path) -> list[Path]:
    """What a run that was killed was writing."""
    return [file for name in (OWN_PROMPTS, UNDER_WAY) for file in out.glob(f"{name}.*.partial")]


def check_data_folder(out: Path) -> None:
    """Check that a folder is new, empty, or one of an earlier run, before the model is loaded and makes prompts for it.

    Raises:
        ConfigurationError: it holds something else.
    """
    if not out.is_dir() or (out / FILE).exists():
        return
    if {*out.iterdir()} - {out / OWN_PROMPTS, out / UNDER_WAY, *_unfinished(out)}:
        raise ConfigurationError(
            "holds other things; give a new folder, or one of an earlier run", field="--out", verb="", value=out
        )


def open_folder(out: Path, wanted: DataManifest) -> tuple[DataManifest, list[str]]:
    """Begin a folder of training data, or go on with one. Returns its manifest, and the faults of shards to be made again.

    Raises:
        ConfigurationError: the folder holds something else, or data of another target or with other options; names them.
        OSError: it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not (out / FILE).exists():
        check_data_folder(out)
        for unfinished in _unfinished(out):
            unfinished.unlink()
        write_manifest(out, wanted)
        return wanted, []
    found = read_data_manifest(out)
    for what, old, new in _differences(found, wanted):
        raise ConfigurationError(
            f"its data were made with {what} {old}, not {new}; give a new folder", field="--out", verb="", value=out
        )
    faults = {entry.file: fault for entry in found.shards if (fault := fault_of(out, entry)) is not None}
    kept = tuple(entry for entry in found.shards if entry.file not in faults)
    manifest = wanted.model_copy(update={"shards": kept})
    write_manifest(out, manifest)
    return manifest, [f"{out / file} {fault}; it is made again" for file, fault in faults.items()]


def _differences(found: DataManifest, wanted: DataManifest) -> Iterator[tuple[str, object, object]]:
    for name in type(wanted.target).model_fields:
        old, new = getattr(found.target, name), getattr(wanted.target, name)
        # The same model may be given by another name.
        if old != new and name != "name":
            yield f"another target ({found.target.name}): {name}", old, new
    if found.layers != wanted.layers:
        yield "--layers", list(found.layers), list(wanted.layers)
    for name in type(wanted.sampling).model_fields:
        old, new = getattr(found.sampling, name), getattr(wanted.sampling, name)
        if old != new:
            yield f"--{name.replace('_', '-').removesuffix('-per-prompt')}", old, new
    if found.prompts_sha256 != wanted.prompts_sha256:
        yield (
            "other prompts:",
            f"{found.prompts} of {', '.join(found.domains)}",
            f"{wanted.prompts} of {', '.join(wanted.domains)}",
        )
