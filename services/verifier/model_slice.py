"""The layers that one stage of a target computes: all of them, where there is a single stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.machine import cores
from services.verifier.arithmetic import experts
from services.verifier.arithmetic.kernels import Choice, choose_kernels, maker
from services.verifier.arithmetic.linears import as_linears, pack_linears, quantize
from services.verifier.arithmetic.parameters import pack_parameters
from services.verifier.arithmetic.whole_vectors import fill_vectors
from services.verifier.attention import calls as attention
from services.verifier.attention.calls import MAX_NODES, Calls, Running, answering
from services.verifier.attention.recording import record
from services.verifier.attention.tiled import TiledPass
from services.verifier.config import TargetConfig
from services.verifier.graphs import Graphs
from services.verifier.kv_cache.pool import KVPool
from services.verifier.loading import adapters
from services.verifier.loading.adapters import inputs_of
from services.verifier.loading.load_model import load_layers, load_whole, split_layers
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.native import attention_kernel as native_attention
from services.verifier.native.layer_kernel import fuse
from services.verifier.native.library import library
from speculation.errors import ConfigurationError
from speculation.ports import Rows
from speculation.types import Features

log = logging.getLogger(__name__)

# Of passes that show how a model calls attention, and what its layers are.
_TRIAL_ROWS = 8


class ModelSlice:
    """Stage ``stage`` of the target, with its part of the key-value cache.

    Raises:
        ConfigurationError: the model cannot be loaded or served; says why.
    """

    def __init__(self, config: TargetConfig, stage: int) -> None:
        # Said outright, since a cluster may have set OMP_NUM_THREADS to what it reserved rather than what there is.
        torch.set_num_threads(config.threads or max(1, cores() // config.stages))
        self.is_first, self.is_last = stage == 0, stage == config.stages - 1
        self.device = torch.device(config.device)
        layers = split_layers(config)[stage]
        self.model: PreTrainedModel = load_whole(config) if config.stages == 1 else load_layers(config, layers)
        self.model.eval().requires_grad_(False)
        # The largest tree that a step may check lies behind the tokens, so that a full-length request fits too.
        rows = config.kv_cache_tokens + MAX_NODES
        adapters.install(self.model, rows, self.device)
        self.choice = _pack(self.model, config)
        self._min_rows = self.choice.min_rows
        self.dtype = arithmetic_dtype(config)
        self.model.to(self.device)
        if config.dtype == "int8":
            # What is not quantised; computed buffers (rotary frequencies) stay as exact as they are.
            for parameter in self.model.parameters():
                if parameter.is_floating_point() and type(parameter.data) is torch.Tensor:
                    parameter.data = parameter.data.to(self.dtype)
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self._calls = self._recorded(rows)
        calls = [call for own in self._calls.values() for call in own]
        self.pool = KVPool(calls, rows=rows, dtype=self.dtype, device=self.device)
        # What the output layer read in the last pass: [1, rows asked for or more, hidden size].
        self._read = torch.empty(1, 0, self.hidden_size)
        if self.is_last:
            self.model.get_output_embeddings().register_forward_pre_hook(self._note_read)
        kernels = library(self.choice.instructions) if self.choice.instructions else None
        self._kernel = native_attention.kernel_for(kernels, self.pool)
        self._graphs = self._captured() if self.device.type == "cuda" and self.dtype != torch.float32 else None
        if self._kernel is not None:
            self._fuse()

    def _recorded(self, longest: int) -> Calls:
        entering = torch.arange(1, _TRIAL_ROWS + 1, device=self.device)[None]
        if not self.is_first:
            entering = torch.randn(1, _TRIAL_ROWS, self.hidden_size, dtype=self.dtype, device=self.device)
        try:
            return record(self.model, entering, longest)
        except Exception as error:
            # Architectures that were never tried may fail at anything.
            reason = str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"{type(self.model).__name__} cannot be served: {' '.join(reason.split())}") from error

    @torch.inference_mode()
    def _fuse(self) -> None:
        """Let our kernel compute whole layers where it computes the same."""
        kernel = self._kernel
        assert kernel is not None
        owner = "fusing"
        self.pool.assign(owner, [0], 1)
        tokens = tuple(range(1, _TRIAL_ROWS + 1))
        hidden = None if self.is_first else torch.randn(_TRIAL_ROWS, self.hidden_size)

        def trial_pass() -> Running:
            batch = [Rows(session_id=owner, context=0, tokens=tokens, logits=1)]
            running = Running(native_attention.lay_out(kernel, self.pool, batch, 0), self._calls)
            self._decode(running, list(tokens), hidden)
            return running

        try:
            done, reason = fuse(kernel.library, self.model.get_decoder().layers, trial_pass, self._calls)
        except (AttributeError, TypeError, NotImplementedError) as error:
            done, reason = 0, str(error)
        finally:
            self.pool.clear()
        log.info("%d layers in one call each%s", done, f"; others not: {reason}" if reason else "")

    @torch.inference_mode()
    def run(self, batch: Sequence[Rows], hidden: torch.Tensor | None) -> torch.Tensor:
        """One pass through the slice.

        Args:
            hidden: [rows, hidden size], what the stage before has made of them; None for the first.

        Returns:
            [rows, hidden size] for the next stage; from the last one [rows asked for, vocabulary] logits in float32. On the
            CPU.

        Raises:
            ValueError: a tree has more than ``MAX_NODES`` nodes.
        """
        self.pool.clean()
        # What the output layer reads is not kept by captured passes.
        graphs = None if any(rows.features for rows in batch) else self._graphs
        if graphs is not None and (captured := graphs.run(batch, hidden)) is not None:
            return captured[_wanted_rows(batch)].float().cpu() if self.is_last else captured.cpu()
        tokens = [token for rows in batch for token in rows.tokens]
        padding = max(0, self._min_rows - len(tokens))
        running = Running(self._lay_out(batch, padding), self._calls)
        given = None if hidden is None else nn.functional.pad(hidden.to(self.device), (0, 0, 0, padding))
        if not self.is_last:
            return self._decode(running, tokens + [0] * padding, given)[: len(tokens)].cpu()
        wanted = _wanted_rows(batch)
        # No fewer rows than a layer may get, in the output layer as well.
        kept = wanted + [len(tokens) + padding - 1] * max(0, self._min_rows - len(wanted))
        with answering(running):
            logits: torch.Tensor = self.model(
                **self._inputs(self.model, running, tokens + [0] * padding, given),
                logits_to_keep=torch.tensor(kept, device=self.device),
            ).logits[0, : len(wanted)]
        return logits.float().cpu()

    def _decode(self, running: Running, tokens: list[int], hidden: torch.Tensor | None) -> torch.Tensor:
        """[rows, hidden size], what the layers make of the tokens, or of the hidden states of the stage before."""
        with answering(running):
            decoder = self.model.get_decoder()
            made: torch.Tensor = decoder(**self._inputs(decoder, running, tokens, hidden)).last_hidden_state[0]
        return made

    def _inputs(self, module: nn.Module, running: Running, tokens: list[int], hidden: torch.Tensor | None) -> dict[str, Any]:
        own = {**inputs_of(module, running.laid_out.positions[None]), "use_cache": False}
        if hidden is None:
            return {**own, "input_ids": torch.tensor([tokens], device=self.device)}
        return {**own, "inputs_embeds": hidden[None]}

    def features(self, rows: Sequence[int]) -> Features:
        """What the output layer read in the last pass, of these among its rows with logits; in float16."""
        read = self._read[0, list(rows)].to("cpu", torch.float16).numpy()
        return Features(data=read.astype("<f2").tobytes(), rows=len(rows), width=self.hidden_size, dtype="float16")

    def _note_read(self, module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._read = given[0]

    def _captured(self) -> Graphs:
        """Passes whose shapes depend on their bucket alone: every row's logits are computed, wanted or not."""

        module = self.model if self.is_last else self.model.get_decoder()

        def run(laid_out: attention.Pass, given: torch.Tensor) -> torch.Tensor:
            inputs = inputs_of(module, laid_out.positions[None])
            inputs["input_ids" if self.is_first else "inputs_embeds"] = given[None]
            with answering(Running(laid_out, self._calls)):
                found = module(**inputs, use_cache=False)
            made: torch.Tensor = found.logits[0] if self.is_last else found.last_hidden_state[0]
            return made

        of_rows = () if self.is_first else (self.hidden_size,)
        dtype = torch.int64 if self.is_first else self.dtype
        return Graphs(self.pool, run, torch.empty(0, *of_rows, dtype=dtype, device=self.device))

    def _lay_out(self, batch: Sequence[Rows], padding: int) -> attention.Pass:
        largest = max(len(rows.parents) for rows in batch)
        if largest > MAX_NODES:
            raise ValueError(f"a tree of {largest} nodes: at most {MAX_NODES}")
        if self._kernel is not None:
            return native_attention.lay_out(self._kernel, self.pool, batch, padding)
        return TiledPass(self.pool, batch, padding)


def _wanted_rows(batch: Sequence[Rows]) -> list[int]:
    """Indices of the rows whose logits are asked for."""
    wanted: list[int] = []
    end = 0
    for rows in batch:
        end += len(rows.tokens)
        wanted += range(end - rows.logits, end)
    return wanted


def _pack(model: PreTrainedModel, config: TargetConfig) -> Choice:
    """Put faster linear layers in; returns which."""
    if config.device != "cpu":
        if config.dtype == "int8":
            quantize(model)
        return Choice(linears="torch")
    fill_vectors()
    experts.use(model)
    if config.dtype == "bfloat16":
        return Choice(linears="torch")
    as_linears(model)
    choice = choose_kernels(model, config)
    make = maker(choice, config.dtype)
    if make is not None:
        log.info("packed %d linear layers", pack_linears(model, make))
        # Where a row goes is decided by weights as they are.
        single = maker(choice)
        assert single is not None
        log.info("%d other parameters are packed when they are first used", pack_parameters(model, make, single))
    # Whatever else the weights' form was, arithmetic is float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return choice
