"""Any causal language model of transformers that drafts, over caches of our own, for many sessions in one pass.

The rows of all sessions stand one after the other, each with its own position, so nothing is padded, however much their
lengths differ. Linear layers see them all at once; only attention goes from session to session.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from services.drafter.draft_model.row_buffers import RowBuffers, mask_of
from services.drafter.draft_model.text_cache import NewRows, TextCache
from services.machine.held_variable import held
from services.model_files.weights.rounded_inputs import unrounded
from speculation.errors import ConfigurationError

_NAME = "outrider_draft"
# Largest difference from transformers' own logits, as a share of the largest logit.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class DraftLM:
    """Implements ``LanguageModel`` by torch, on any device.

    Args:
        model: on its device, without gradients.
        folder: where it comes from, for errors.
        kept: the ids whose logits are computed, ascending; None: all.

    Raises:
        ConfigurationError: its logits over our caches are not its own logits, or its output layer cannot be cut to ``kept``.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, kept: Sequence[int] | None = None) -> None:
        AttentionInterface.register(_NAME, _attend)
        self.device = model.device
        self._model = model
        # Rounding would make a last bit as large as a step from code to code.
        with unrounded(model):
            self._compare(folder)
        if kept is not None:
            self._cut_head(kept, folder)

    def new_rows(self) -> RowBuffers:
        return RowBuffers()

    @torch.inference_mode()
    def logits(self, parts: Sequence[NewRows]) -> list[torch.Tensor]:
        tokens = [token for part in parts for token in part.tokens]
        positions = [position for part in parts for position in part.positions]
        wanted: list[int] = []
        end = 0
        for part in parts:
            end += len(part.tokens)
            wanted += range(end - part.logits, end)
        with held(_running, _Pass(parts, self.device)):
            made = self._model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                # Without any, the output layer is still asked for one row.
                logits_to_keep=torch.tensor(wanted or [0], device=self.device),
                use_cache=False,
            ).logits[0]
        return list(torch.split(made[: len(wanted)].float().cpu(), [part.logits for part in parts]))

    def _cut_head(self, kept: Sequence[int], folder: Path) -> None:
        head = self._model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigurationError(
                f"cannot draft with the model at {folder}: its output layer is {type(head).__name__}, of which no rows "
                "can be left out: use a draft model with the target's tokeniser",
                about=folder,
            )
        rows = torch.tensor(kept, device=self.device)
        cut = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, device="meta")
        cut.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
        if head.bias is not None:
            cut.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
        self._model.set_output_embeddings(cut)

    @torch.inference_mode()
    def _compare(self, folder: Path) -> None:
        """Compare a text computed in parts, with a branch that is rolled back, with one plain pass of transformers' own."""
        model = self._model
        size = model.get_input_embeddings().num_embeddings
        text = [(7 * step + 3) % size for step in range(12)]
        try:
            ids = torch.tensor([text], device=self.device)
            model.set_attn_implementation("eager")
            plain = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
            model.set_attn_implementation(_NAME)
            cache, other = TextCache(self.new_rows()), TextCache(self.new_rows())
            *_, first = self.logits([other.add_text(text[:3], 1), cache.add_text(text[:7], 7)])
            self.logits([cache.add_drafts([text[0], text[7]], [6, 6])])
            (second,) = self.logits([cache.add_drafts([text[8], text[1]], [8, 7])])
            cache.keep(text)
            (third,) = self.logits([cache.add_text(text[9:], 3)])
            found, own = torch.cat((first, second[:1], third)), torch.cat((plain[:7], plain[8:]))
        except Exception as error:
            # Architectures that were never tested may fail in any way.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigurationError(
                f"cannot draft with the model at {folder}: {type(model).__name__}: {reason}", about=folder
            ) from error
        difference, largest = float((found - own).abs().max()), float(own.abs().max())
        if not difference <= _TOLERANCE[model.dtype] * largest:
            raise ConfigurationError(
                f"cannot draft with the model at {folder}: {type(model).__name__} keeps a state that cannot be rolled back, "
                f"or masks of its own: its logits differ by {difference:.2g} from a plain pass",
                about=folder,
            )


class _Pass:
    """Answers the attention calls of one pass, in their order."""

    def __init__(self, parts: Sequence[NewRows], device: torch.device) -> None:
        masks = [mask_of(part) for part in parts]
        self._parts = [(part, None if mask is None else mask.to(device)) for part, mask in zip(parts, masks, strict=True)]
        self._calls = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Tensors without the first dimension of 1; returns [rows, heads, value size]."""
        layer, self._calls = self._calls, self._calls + 1
        made = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        begin = 0
        for part, mask in self._parts:
            end = begin + len(part.tokens)
            held = part.cache.held
            assert isinstance(held, RowBuffers)
            keys, values = held.store(layer, part, key[:, begin:end], value[:, begin:end])
            if window is not None and keys.shape[1] > window:
                mask = _within(window, part, keys.shape[1], mask, query.device)
            own = query[:, begin:end]
            if softcap is None and sinks is None:
                found = _fast(own, keys, values, mask, scale)
            else:
                found = _grouped(own, keys, values, mask, scale, softcap, sinks)
            made[begin:end] = found.transpose(0, 1)
            begin = end
        return made


def _fast(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    if query.shape[1] == 1 and query.device.type == "cpu":
        # Heads that share keys are rows of one product.
        own = query.reshape(1, keys.shape[0], -1, query.shape[2])
        mask = mask if mask is None else mask.expand(own.shape[2], -1)
        found = functional.scaled_dot_product_attention(own, keys[None], values[None], attn_mask=mask, scale=scale)
        return found.view(query.shape[0], 1, values.shape[2])
    return functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=query.shape[0] != keys.shape[0]
    )[0]


def _grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    heads, rows, size = query.shape
    scores = query.reshape(keys.shape[0], -1, size) @ keys.transpose(1, 2) * (scale if scale is not None else size**-0.5)
    scores = scores.view(heads, rows, -1).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        # A score that takes its share, and brings no value.
        scores = torch.cat((scores, sinks.float().reshape(-1, 1, 1).expand(heads, rows, 1)), dim=2)
    shares = scores.softmax(2)[..., : keys.shape[1]].to(values.dtype)
    return (shares.reshape(keys.shape[0], -1, keys.shape[1]) @ values).view(heads, rows, -1)


def _within(window: int, part: NewRows, rows: int, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """``mask`` without the rows that are further back than a sliding window."""
    seen = torch.tensor(part.cache.positions(rows), device=device)
    near = torch.tensor(part.positions, device=device)[:, None] - seen < window
    return near if mask is None else mask & near


# A context variable, since not every architecture passes keyword arguments down to its attention layers.
_running: ContextVar[_Pass | None] = ContextVar("running", default=None)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """An attention call of a model; the signature is transformers'. Tensors are [1, heads, rows, size]."""
    one = _running.get()
    if one is None:
        raise NotImplementedError("no pass runs")
    made = one.attend(query[0], key[0], value[0], scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return made[None], None
