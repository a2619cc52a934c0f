"""What becomes of a causal language model of any type: served as transformers computes it, or refused by name.

    python -m tests.lossless.architectures > docs/models.md

Each type gets a tiny random model (``tiny_configs``), which is loaded, decoded and looked at as a real one would be.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.machine.processor import cores
from services.verifier.checks.guard import check_slice
from services.verifier.config import Dtype, TargetConfig
from services.verifier.loading.adapters import inputs_of
from services.verifier.loading.load_model import hollow_model
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import Draft, DraftFailure
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import STRATEGIES
from speculation.types import Plan, TokenTree
from tests.engine.fakes import PLAIN, RandomDrafter, collect, decoding, request
from tests.lossless.models_page import NOT_MADE, Outcome, page, row
from tests.lossless.tiny_configs import tiny_config
from tests.tiny_models.tiny import make_tiny_tokenizer

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

ANSWER = 16
# Longer than every window and chunk of a tiny model; the first answer crosses a tile of the key-value pool.
_LENGTHS = (53, 23, 67)
_NO_EMBEDDINGS_AMONG_STATES = ("falcon_mamba", "mamba", "mamba2", "rwkv")
# Where the first and second most likely token are nearer, rounding in another order may choose the other one. Relative to
# how far logits spread.
NEAR_TIE = 1e-3


@torch.no_grad()
def make(model_type: str, folder: Path) -> PreTrainedModel | None:
    """Write a tiny model of the type to ``folder``; None: only its configuration, see ``NOT_MADE``.

    Raises:
        Exception: whatever the type's classes raise: the rules of ``tiny_configs`` do not suffice.
    """
    vocab_size = make_tiny_tokenizer(folder)
    if model_type in NOT_MADE:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": vocab_size}))
        return None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, vocab_size), dtype=torch.float32).eval()
    for parameter in model.parameters():
        # Norms and biases are made as ones and zeros, which would hide who forgets them; some weights are not made at all.
        if parameter.dim() < 2 or not bool(parameter.isfinite().all()):
            parameter.copy_(parameter.nan_to_num(0, 0, 0).clamp(-2, 2) + 0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    return model


def prompts(vocab_size: int) -> list[list[int]]:
    """Three, each with something that repeats."""
    source = random.Random(1)
    made = []
    for length in _LENGTHS:
        text = [source.randrange(1, vocab_size) for _ in range(length - 8)]
        made.append(text + text[:8])
    return made


class GuidedDrafter(RandomDrafter):
    """Trees that hold the right continuation for some tokens, or for none, among wrong siblings and cousins."""

    def __init__(self, vocab: int, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(vocab=vocab)
        self._answers = answers

    @override
    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        tokens = self.sessions[session_id]
        base = {"base_length": len(tokens), "base_hash": extend_hash(EMPTY_HASH, tokens)}
        return Draft(session_id=session_id, tree=self._tree(tokens, max_nodes), **base)

    def _tree(self, tokens: list[int], max_nodes: int) -> TokenTree:
        known = next((answer for answer in self._answers if list(answer[: len(tokens)]) == tokens), tokens)
        made: list[int] = []
        parents: list[int] = []
        at = -1

        def add(parent: int, token: int) -> None:
            parents.append(parent)
            made.append(token)

        for right in known[len(tokens) : len(tokens) + max(0, self.random.randint(-1, 4))]:
            for _ in range(self.random.randint(0, 1)):
                add(self.random.randint(-1, len(made) - 1), self.random.randrange(self.vocab))
            add(at, right)
            at = len(made) - 1
        for _ in range(self.random.randint(0 if made else 1, 1)):
            add(self.random.randint(-1, len(made) - 1), self.random.randrange(self.vocab))
        kept = min(max_nodes, len(made))
        return TokenTree(tokens=tuple(made[:kept]), parents=tuple(parents[:kept]), sources=("guided",) * kept)


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """``ANSWER`` tokens by transformers' own ``generate``, end-of-text ignored."""
    given = torch.tensor([list(prompt)])
    answer = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=ANSWER, min_new_tokens=None, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


# Plain decoding, trees of right and wrong continuations, and the default strategy's own; so many requests at once.
RUNS = (("autoregressive", 1), ("autoregressive", 3), ("guided", 1), ("guided", 3), ("blend", 3))


async def served(
    target: TransformersTarget, wanted: list[list[int]], expected: list[list[int]]
) -> AsyncIterator[list[tuple[list[int], list[float]]]]:
    """The service's answers, for each of ``RUNS``: tokens, and the log-probabilities of all but the default strategy's."""
    whole = [[*prompt, *answer] for prompt, answer in zip(wanted, expected, strict=True)]
    for strategy, at_once in RUNS:
        drafter = GuidedDrafter(target.vocab_size, whole) if strategy == "guided" else DrafterService(DrafterConfig())
        sources = ("guided",) if strategy == "guided" else STRATEGIES[strategy]
        plan = Plan(strategy=strategy, sources=sources, max_nodes=6, observe_top_k=6) if sources else PLAIN
        made: list[tuple[list[int], list[float]]] = []
        # Of the default strategy as users ask, who seldom want them.
        logprobs = None if strategy == "blend" else 0
        async with decoding(target, InProcessDraftLink(drafter), max_batched_tokens=50) as loop:
            for start in range(0, len(wanted), at_once):
                part = [
                    request(f"r{start + i}", prompt, plan, max_tokens=ANSWER, ignore_eos=True, logprobs=logprobs)
                    for i, prompt in enumerate(wanted[start : start + at_once])
                ]
                made += [
                    (tokens, [token.logprob for step in steps for token in step.logprobs])
                    for tokens, _, steps in await asyncio.gather(*(collect(loop, one) for one in part))
                ]
        yield made


async def difference(target: TransformersTarget, model: PreTrainedModel, exact: bool) -> tuple[str, int]:
    """What the service says otherwise than transformers' ``generate``; and how often at a near tie alone.

    Args:
        exact: log-probabilities must be the same bits, too, as those of plain decoding alone. A wrong state changes them
            long before it changes a token.
    """
    wanted = prompts(target.vocab_size)
    expected = [greedy(model, prompt) for prompt in wanted]
    ties = 0
    made_by_run = [made async for made in served(target, wanted, expected)]
    for run, made in zip(RUNS, made_by_run, strict=True):
        place = f"({run[0]}, {run[1]} at a time)"
        for prompt, theirs, (ours, chances), (_, alone) in zip(wanted, expected, made, made_by_run[0], strict=True):
            if ours != theirs:
                at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), len(ours))
                if at == len(ours) or not _nearly_tied(model, [*prompt, *theirs[:at]], ours[at], theirs[at]):
                    return f"other tokens than transformers from token {at} on {place}", ties
                ties += 1
            if exact and chances and chances != alone:
                return f"other log-probabilities than those of plain decoding alone {place}", ties
    return "", ties


@torch.no_grad()
def _nearly_tied(model: PreTrainedModel, tokens: list[int], one: int, other: int) -> bool:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return bool((logits[one] - logits[other]).abs() <= NEAR_TIE * logits.std())


def bits(target: TransformersTarget) -> bool:
    """Whether rows have the same bits alone, in a chunk, in a tree and beside other requests."""
    source = random.Random(2)
    text = tuple(source.randrange(target.vocab_size) for _ in range(72))
    for name in ("alone", "chunk", "tree", "other"):
        assert target.open(name, 120)
    # Row by row at the beginning, and from behind every window to across the border of a tile.
    sizes = (*[1] * 12, 44, *[1] * 16)
    ends = itertools.accumulate(sizes)
    steps = [_rows("alone", end - size, text[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    alone = torch.cat([target.forward([step])[0] for step in steps])
    parts = [_rows("chunk", 0, text[:37]), _rows("chunk", 37, text[37:])]
    chunks = torch.cat([target.forward([part])[0] for part in parts])
    target.forward([_rows("tree", 0, text[:60])])
    target.forward([_rows("other", 0, text[:59])])
    # Right nodes at 1, 3 and 4.
    tree = Rows(
        request_id="tree", context=60, tokens=(text[60], 5, text[61], 6, *text[62:64]), parents=(-1, -1, 0, 1, 3), logits=6
    )
    beside, checked = target.forward([_rows("other", 59, text[59:70]), tree])
    for name in ("alone", "chunk", "tree", "other"):
        target.close(name)
    return (
        torch.equal(chunks, alone) and torch.equal(beside, alone[59:70]) and torch.equal(checked[[0, 2, 4, 5]], alone[60:64])
    )


def _rows(name: str, context: int, tokens: tuple[int, ...]) -> Rows:
    return Rows(request_id=name, context=context, tokens=tokens, logits=len(tokens))


def stages(config: TargetConfig, target: TransformersTarget, exact: bool) -> str:
    """Why the model cannot be split into a stage for each layer, or what is wrong then; empty: it can.

    Args:
        exact: with the same bits.
    """
    text = _rows("whole", 0, tuple(range(1, 60)))
    assert target.open("whole", 64)
    whole = target.forward([text])[0]
    target.close("whole")
    try:
        # So that a layer that derives its kind from its place gets another place, however kinds take turns.
        count = hollow_model(config).config.get_text_config().num_hidden_layers
        parts = [ModelSlice(replace(config, stages=count), stage) for stage in range(count)]
        for part in parts:
            check_slice(part, len(parts))
    except ConfigurationError as error:
        return str(error)
    hidden = None
    for part in parts:
        part.memory.assign("whole", [0], 1)
        hidden = part.run([text], hidden)
    assert hidden is not None
    if not (torch.equal(hidden, whole) if exact else torch.allclose(hidden, whole, atol=NEAR_TIE * float(whole.std()))):
        raise AssertionError(f"{count} stages compute something else")
    return ""


@torch.no_grad()
def hidden_states(target: TransformersTarget, model: PreTrainedModel) -> str:
    """Why hidden states can be had of the last layer alone; empty: of every layer; all are transformers' own."""
    count = model.config.get_text_config().num_hidden_layers
    source = random.Random(3)
    text = tuple(source.randrange(1, target.vocab_size) for _ in range(40))
    layers, reason = (*range(count - 1), -1), ""
    try:
        target.check_layers(layers)
    except InvalidArgument as error:
        layers, reason = (-1,), str(error)
    assert target.open("hidden", 48)
    target.forward([Rows(request_id="hidden", context=0, tokens=text, logits=1, layers=layers)])
    features = target.features("hidden", range(len(text)))
    target.close("hidden")
    ours = torch.frombuffer(bytearray(features.data), dtype=torch.float16).reshape(len(text), len(layers), -1).float()
    read: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0]))
    positions = inputs_of(model, torch.arange(len(text))[None])
    states = model(torch.tensor([text]), **positions, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    # Theirs begin with the embeddings, but for a few types.
    first = 0 if model.config.model_type in _NO_EMBEDDINGS_AMONG_STATES else 1
    theirs = [read[0] if layer == -1 else states[layer + first] for layer in layers]
    for layer, right, found in zip(layers, theirs, ours.unbind(1), strict=True):
        # In float16, and computed in another order: some experts are chosen by a hair.
        if not float((found - right[0]).norm() / right.norm()) < 2e-3:
            raise AssertionError(f"other hidden states of layer {layer}")
    return reason


async def outcome(model_type: str, folder: Path) -> Outcome:
    """Make a tiny model of the type, and see.

    Raises:
        Exception: the model cannot be made; see ``NOT_MADE``.
    """
    model = make(model_type, folder)
    config = TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1)
    try:
        target = TransformersTarget(config)
    except ConfigurationError as error:
        return Outcome(refusal=str(error).replace(str(folder), "its folder"))
    except Exception as error:
        return Outcome(wrong=f"{type(error).__name__} at its load")
    if model is None:
        return Outcome(wrong="served, though transformers cannot make it")
    try:
        exact = bits(target)
        wrong, ties = await difference(target, model, exact)
        if wrong:
            return Outcome(wrong=wrong)
        layers = hidden_states(target, model)
        return Outcome(
            exact=exact,
            near_ties=ties,
            stages=stages(config, target, exact),
            dtypes=tuple(dtypes(config)),
            layers=layers,
        )
    except Exception as error:
        return Outcome(wrong=f"{type(error).__name__}: {error}")


def dtypes(config: TargetConfig) -> Iterator[Dtype]:
    """Those that the model is served in."""
    yield config.dtype
    for dtype in get_args(Dtype):
        if dtype == config.dtype:
            continue
        with suppress(ConfigurationError):
            TransformersTarget(replace(config, dtype=dtype))
            yield dtype


def _row_of(model_type: str) -> str:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        return row(model_type, asyncio.run(outcome(model_type, Path(folder))))


def main() -> None:
    """Print docs/models.md."""
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as workers:
        rows = list(workers.map(_row_of, TYPES))
    print(page(rows, transformers.__version__, ANSWER))


if __name__ == "__main__":
    main()
