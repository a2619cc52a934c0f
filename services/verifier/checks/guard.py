"""Checks before the first request that a loaded model is served as its own code computes it. Other models are refused.

The reference is transformers' own pass over a whole sequence, with eager attention and without our pool. The same modules
then compute the same tokens the way they will be served: a first prompt chunk, a second one after it, a tree of two
branches, beside another request, and what follows the part of a branch that is kept. A model whose rows differ is refused by
name. Attention windows and chunks longer than these few rows are read from the model's own masks, and not tested here.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.rounded_inputs import unrounded
from services.verifier.attention.calls import computing_by
from services.verifier.loading.adapters import exact_attention
from services.verifier.loading.decoder_parts import EMBEDDED, DecoderParts
from services.verifier.model.embedded_rows import embedding
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError, OutriderError

if TYPE_CHECKING:
    from services.verifier.model.slice import ModelSlice

log = logging.getLogger(__name__)

# Rows of each sequence, and the position after which the tree's two branches begin.
_ROWS = 32
_FORK = 24
# The reference's sequences: a text, one that differs from it after the fork, and another request's.
_TEXT, _BRANCH, _OTHER = range(3)
# The nodes of the tree, by sequence and position.
_BRANCHES = [(sequence, position) for position in range(_FORK + 1, _ROWS) for sequence in (_TEXT, _BRANCH)]
# How much rounding in another order may change a row, relative to its spread. In float32, correct models of all types stay
# below a fiftieth of this; wrong computations exceed it at least tenfold.
_LEAST = {torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.02}
_MOST = 0.6
# More sensitive rows are allowed this many times the change that one rounding of the model's input causes, up to ``_MOST``.
_ROUNDINGS = 6
# The share of a part's rows, from the best to the worst, that must be right. In half precision one row is enough: others may
# be routed to other experts, or attend to such rows. A wrong computation gets none right.
_RIGHT = {torch.float32: 1.0, torch.float16: 0.0, torch.bfloat16: 0.0}
# What layers may be given besides hidden states: it follows from positions, or tokens, so every stage can compute it.
_COMPUTED = {"attention_mask", "position_ids", "position_embeddings", "cache_position", "causal_mask", EMBEDDED}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Rows of the reference that one pass computes for a request, and the name of such a part in messages."""

    sequence: int
    positions: Sequence[int]
    what: str


def check_slice(part: ModelSlice, stages: int = 1) -> None:
    """Compare what a slice of a model computes with what the model's own code does.

    Args:
        part: just loaded, with no blocks of its pool in use.
        stages: the number of slices of the model.

    Raises:
        ConfigurationError: they differ, or cannot be compared; says how or why.
    """
    start = time.perf_counter()
    name = _name(part.model)
    try:
        # Rounding would make a last bit as large as a step from code to code.
        with unrounded(part.model):
            given = _inputs(part)
            if stages > 1:
                _check_hand_over(part, given)
            expected = _reference(part, given)
            served = _serve(part, given)
            reason = _difference(part, given, expected, served)
    except OutriderError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigurationError(f"{name} cannot be served: {' '.join(reason.split())[:300]}", about=name) from error
    finally:
        part.memory.clear()
    if reason:
        raise ConfigurationError(f"{name} cannot be served: {reason}", about=name)
    log.info("%s is served as its own eager attention computes it; checked in %.2f s", name, time.perf_counter() - start)


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type})"


@torch.inference_mode()
def _inputs(part: ModelSlice) -> torch.Tensor:
    """[3, rows] token ids for the first slice, else [3, rows, hidden size] hidden states."""
    if part.is_first:
        return _tokens(part)
    generator = torch.Generator().manual_seed(0)
    return _forked(torch.randn(3, _ROWS, part.hidden_size, generator=generator, dtype=torch.float32).to(part.dtype))


def _tokens(part: ModelSlice) -> torch.Tensor:
    """[3, rows] token ids; only a few models read them in later slices."""
    generator = torch.Generator().manual_seed(0)
    return _forked(torch.randint(1, part.model.config.get_text_config().vocab_size, (3, _ROWS), generator=generator))


def _forked(given: torch.Tensor) -> torch.Tensor:
    given[_BRANCH, : _FORK + 1] = given[_TEXT, : _FORK + 1]
    return given


@torch.inference_mode()
def _reference(part: ModelSlice, given: torch.Tensor, stretched: int = 1) -> torch.Tensor:
    """One pass of transformers over whole sequences: [3, rows, vocabulary or hidden size], float32, on the CPU.

    Args:
        stretched: distance in positions from row to row.
    """
    module = part.model if part.is_last else part.model.get_decoder()
    named: dict[str, Any] = {"use_cache": False, ("input_ids" if part.is_first else "inputs_embeds"): given.to(part.device)}
    accepted = inspect.signature(module.forward).parameters
    if "position_ids" in accepted or any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
        positions = torch.arange(given.shape[1], device=part.device) * stretched
        named["position_ids"] = positions.expand(len(given), -1)
        if stretched > 1:
            # Without a mask, transformers would take gaps between positions for borders between packed texts.
            named["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.int64, device=part.device)
    tokens = _tokens(part)[:, : given.shape[1]].to(part.device)
    with _as_transformers_has_it(part.model), embedding(part.embedded, tokens):
        made = module(**named)
    result: torch.Tensor = made.logits if part.is_last else made.last_hidden_state
    return result.float().cpu()


@contextmanager
def _as_transformers_has_it(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, use eager attention and remove every method that was replaced on a module of the model."""
    methods = [
        (module, name, method)
        for module in model.modules()
        for name, method in vars(module).items()
        if callable(method) and inspect.isfunction(inspect.getattr_static(type(module), name, None))
    ]
    try:
        for module, name, _ in methods:
            delattr(module, name)
        with computing_by(model, exact_attention):
            yield
    finally:
        for module, name, method in methods:
            setattr(module, name, method)


# Rows of the reference that one pass computes for a request, its name, and the parents of nodes behind them.
_Piece = tuple[_Part, str, tuple[int, ...]]


def _serve(part: ModelSlice, given: torch.Tensor) -> list[tuple[_Part, torch.Tensor]]:
    """What the slice computes from the same inputs when served: the result rows of each part of each pass."""
    part.memory.assign("text", [0], 1)
    part.memory.assign("other", [1], 1)
    first, half, accepted = _FORK // 3, _ROWS // 3, (_ROWS - _FORK) // 2
    # Nodes alternate between the two branches, so the parent of each but the first two is the node two before it.
    parents = tuple(node - 2 if node >= 2 else -1 for node in range(len(_BRANCHES)))
    passes: list[list[_Piece]] = [
        [(_Part(sequence=_TEXT, positions=range(first), what="a first chunk"), "text", ())],
        [
            (_Part(sequence=_TEXT, positions=range(first, _FORK), what="a second chunk"), "text", ()),
            (_Part(sequence=_OTHER, positions=range(half), what="a batch"), "other", ()),
        ],
        [
            (_Part(sequence=_OTHER, positions=range(half, _ROWS), what="a batch"), "other", ()),
            (_Part(sequence=_TEXT, positions=[_FORK], what="a tree"), "text", parents),
        ],
    ]
    results = [made for one in passes for made in _pass(part, given, one)]
    # The first branch's nodes are the even ones; each is a row behind the tree's root.
    part.memory.keep("text", _FORK, [0, *range(1, 2 * accepted, 2)])
    rest = range(_FORK + 1 + accepted, _ROWS)
    return results + _pass(part, given, [(_Part(sequence=_TEXT, positions=rest, what="what follows a tree"), "text", ())])


def _pass(part: ModelSlice, given: torch.Tensor, pieces: Sequence[_Piece]) -> list[tuple[_Part, torch.Tensor]]:
    """One pass over ``pieces``; a tree has the nodes of ``_BRANCHES``."""
    batch, inputs, ids = [], [], _tokens(part)
    for piece, request, nodes in pieces:
        places = [*((piece.sequence, position) for position in piece.positions), *(_BRANCHES if nodes else ())]
        tokens = tuple(int(ids[place]) for place in places)
        batch.append(Rows(request_id=request, context=piece.positions[0], tokens=tokens, parents=nodes, logits=len(tokens)))
        inputs.append(torch.stack([given[place] for place in places]))
    # On a CPU, as the reference.
    made = part.run(batch, None if part.is_first else torch.cat(inputs)).float().cpu()
    results: list[tuple[_Part, torch.Tensor]] = []
    for (piece, _, nodes), rows in zip(pieces, torch.split(made, [len(rows.tokens) for rows in batch]), strict=True):
        results.append((piece, rows[: len(piece.positions)]))
        for sequence in (_TEXT, _BRANCH) if nodes else ():
            places = [1 + node for node, (of, _) in enumerate(_BRANCHES) if of == sequence]
            results.append((_Part(sequence=sequence, positions=range(_FORK + 1, _ROWS), what="a tree"), rows[places]))
    return results


def _difference(
    part: ModelSlice, given: torch.Tensor, expected: torch.Tensor, served: list[tuple[_Part, torch.Tensor]]
) -> str:
    """A sentence on what is computed wrongly; empty if nothing is."""
    if not bool(expected.isfinite().all()):
        return "its logits are no numbers: config.json or its weights are damaged"
    least, right = _LEAST[part.dtype], _RIGHT[part.dtype]
    allowed: torch.Tensor | None = None
    for piece, rows in served:
        off = _distances(rows, expected[piece.sequence, list(piece.positions)])
        # Written so that NaN counts as different.
        if bool(off.quantile(right) <= least):
            continue
        if allowed is None:
            allowed = (_ROUNDINGS * _touchiness(part, given, expected)).clamp(least, _MOST)
        beyond = off / allowed[piece.sequence, list(piece.positions)]
        if bool(beyond.quantile(right) <= 1):
            continue
        if not _is_causal(part, given, expected, float(allowed.median())):
            return "it is not causal: what its rows say depends on what comes after them"
        # Layers with a state may stand for positions.
        if part.states is None and _ignores_positions(part, given, expected) and piece.what != "a first chunk":
            return "it does not use the positions that it is given, so a text can only be computed from its beginning"
        row = int((~(beyond <= 1)).nonzero()[0])
        return (
            f"in {piece.what}, from position {piece.positions[row]} on, it computes something else than its own eager "
            f"attention, by {float(off.max()):.2g} of the spread"
        )
    return ""


def _distances(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Distances of ``rows``, [..., numbers], from the right ones, relative to their spread: [...]."""
    spread = (right - right.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    return (rows - right).square().mean(-1).sqrt() / spread.clamp(min=torch.finfo(torch.float32).tiny)


def _touchiness(part: ModelSlice, given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far rows move when the model's input is rounded once more: [3, rows], relative to their spread."""
    step = torch.finfo(part.dtype).eps
    generator = torch.Generator().manual_seed(1)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + step * torch.randn(rows.shape, generator=generator, dtype=torch.float32).to(rows))

    if not part.is_first:
        return _distances(_reference(part, rounded(given)), expected)
    hook = part.model.get_input_embeddings().register_forward_hook(lambda *made: rounded(made[-1]))
    try:
        return _distances(_reference(part, given), expected)
    finally:
        hook.remove()


def _is_causal(part: ModelSlice, given: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    half = _ROWS // 2
    return float(_distances(_reference(part, given[:, :half]), expected[:, :half]).median()) <= allowed


def _ignores_positions(part: ModelSlice, given: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        return torch.equal(_reference(part, given, stretched=2), expected)
    except (IndexError, RuntimeError):
        # Positions beyond the model's limit fail, so the model does use them.
        return False


@torch.inference_mode()
def _check_hand_over(part: ModelSlice, given: torch.Tensor) -> None:
    """Check that slices pass on hidden states unchanged, and that their layers need nothing else from other slices.

    Raises:
        ConfigurationError: the model cannot be split.
    """
    parts = DecoderParts.of(part.model)
    decoder, layers = parts.decoder, parts.layers
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []
    extra: set[str] = set()
    norms = 0

    def note(module: nn.Module, rows: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Hidden states come first, by whatever name.
        if module is layers[0]:
            entered.append(rows[0] if rows else named["hidden_states"])
        given = {**dict(zip(inspect.signature(module.forward).parameters, rows, strict=False)), **named}
        extra.update(name for name, value in [*given.items()][1:] if isinstance(value, torch.Tensor))

    def note_left(module: nn.Module, rows: object, made: Any) -> None:
        left.append(made if isinstance(made, torch.Tensor) else made[0])

    def count(*_: object) -> None:
        nonlocal norms
        norms += 1

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    hooks += [layers[-1].register_forward_hook(note_left), parts.norm.register_forward_hook(count)]
    try:
        with _as_transformers_has_it(part.model):
            name = "input_ids" if part.is_first else "inputs_embeds"
            positions = torch.arange(_ROWS, device=part.device).expand(len(given), -1)
            made = decoder(**{name: given.to(part.device)}, position_ids=positions, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    reason = ""
    if norms != 1:
        reason = f"its final norm is applied {norms} times in a pass"
    elif not part.is_first and not torch.equal(entered[0].cpu(), given):
        reason = "it changes what enters its first layer"
    elif not part.is_last and not torch.equal(left[0], made):
        reason = "it changes what leaves its last layer"
    elif others := sorted(extra - _COMPUTED):
        reason = f"its layers are also given {', '.join(others)}"
    if reason:
        raise ConfigurationError(
            f"{_name(part.model)} cannot be split: {reason}; use verifier.stages: 1", about="verifier.stages"
        )
