"""The layers that one pipeline stage of a target computes, or a rank's shard of them; all if there is a single process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.machine.processor import cores
from services.verifier.attention import calls as attention
from services.verifier.attention.calls import MAX_NODES, Running, answering
from services.verifier.attention.fixed import largest_pass
from services.verifier.attention.on_gpu import pool_and_buckets
from services.verifier.attention.recording import Recorded, record
from services.verifier.choosing.best_of_shards import best_of_ranks
from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.attention_kernel import PlacedRows
from services.verifier.kernels.native.library import library
from services.verifier.kernels.parameters import round_the_rest
from services.verifier.loading import adapters
from services.verifier.loading.cut_output import cut_output
from services.verifier.loading.load_model import load_layers, load_whole, split_layers
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.model.adaptable_layers import noting_layers
from services.verifier.model.embedded_rows import embedded_rows, embedding
from services.verifier.model.fused_layers import fuse_layers_of
from services.verifier.model.graphs import Graphs, Keep, Made, Replay
from services.verifier.model.hidden_states import HiddenStates
from services.verifier.model.lora_adapters import LoraAdapters
from services.verifier.model.means import MEANS, TargetMeans
from services.verifier.model.pass_layouts import PassLayouts
from services.verifier.model.request_memory import RequestMemory
from services.verifier.model.stream_rows import StreamRows, StreamWeights
from services.verifier.model.target_port import Rows, reads_all, rows_read
from services.verifier.model.to_device import on_the_way, to_device
from services.verifier.recurrence import functions
from services.verifier.recurrence.captured_steps import stepped, unwrapped
from services.verifier.recurrence.state_pool import states_of
from services.verifier.stages.exchange import Exchange
from services.verifier.stages.stage_ranks import RankExchange, StageRanks
from services.verifier.stages.ways import device_of_process
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Rows of the trial passes that show how a model calls attention, and what its layers are.
_TRIAL_ROWS = 8
# Of a cache that is to be rounded: rows that it has while what attends is compared with transformers' own attention.
_COMPARED_ROWS = 512
_Entering = torch.Tensor | None
_Run = Callable[[_Entering, _Entering], torch.Tensor]  # A pass over what the stage before made, see ``ModelSlice.run``.


class ModelSlice:
    """Rank ``rank`` of pipeline stage ``stage`` of the target, with its part of the KV cache.

    Args:
        streams: streams that its passes may hold; only the last stage's.
        outputs: the tokens whose logits are computed, ascending; None: all.
        means: what it is put together from.

    Raises:
        ConfigurationError: the model cannot be loaded or served; says why.

    Attributes:
        shards: the stage's ranks, which must be connected before a pass; None: this is the only one.
        adapters: those that rows may have; None: they may have none.
        embedded: gives its layers what rows are embedded as; None: they need not be given it.
        likeliest: gives the likeliest token after each chosen row of the last pass, as ``choosing.greatest`` does. Valid
            until the next pass; None: the pass's graph has not computed it.
        best: finds what is sought of rows that ranks share; None: they are whole in any case.
    """

    def __init__(
        self,
        config: TargetConfig,
        stage: int,
        streams: StreamWeights | None = None,
        outputs: Sequence[int] | None = None,
        means: TargetMeans = MEANS,
        rank: int = 0,
    ) -> None:
        self._means = means
        ranks = config.tensor_parallel_size
        self.shards = StageRanks(rank, ranks) if ranks > 1 else None
        # Set here, since a cluster may have set OMP_NUM_THREADS to the cores that it reserved rather than those that exist.
        torch.set_num_threads(config.threads or max(1, cores() // config.processes))
        self.is_first, self.is_last = stage == 0, stage == config.stages - 1
        process = stage * ranks + rank
        config = self._config = replace(config, device=device_of_process(config.device, process, config.processes))
        self.device = torch.device(config.device)
        self._make_current()
        shares = split_layers(config)
        layers = shares[stage]
        made = load_whole(config) if config.processes == 1 else load_layers(config, layers, self.shards)
        self.model: PreTrainedModel = made.eval().requires_grad_(False)
        if outputs is not None:
            cut_output(self.model, outputs)
        # A full-length request needs room for the largest tree behind its tokens.
        self._rows = rows = config.cache_tokens + MAX_NODES
        adapters.install(self.model, rows, self.device)
        functions.install(self.model)
        self.choice = means.pack(self.model, config)
        self.dtype = arithmetic_dtype(config)
        self.model.to(self.device)
        if config.dtype == "int8" and self.device.type == "cpu":
            round_the_rest(self.model, self.dtype)
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self.embedded = embedded_rows(self.model, layers)
        head = self.model.get_output_embeddings() if self.is_last else None
        self.hidden_states = HiddenStates(self.model, layers, shares[-1].stop, head, self.device, stay=config.states_stay)
        with noting_layers(self.model, _TRIAL_ROWS) as adaptable:
            self._calls, state_shapes, _ = self._recorded(rows)
        calls = [call for own in self._calls.values() for call in own]
        held = min(rows, _COMPARED_ROWS) if config.rounds_cache else rows
        self.pool, triton = pool_and_buckets(calls, held, self.dtype, self.device, config.attention_backend, means.attention)
        self.library = library(self.choice.instructions) if self.choice.instructions else None
        self.states = states_of(state_shapes, config, self.library, means.steps)
        self.memory = RequestMemory(self.pool, self.states)
        self._layouts = PassLayouts(self.pool, triton, self.library if config.attention_backend == "auto" else None)
        self._graphs: Graphs | None = None
        # A pass that is laid out, and what runs it.
        self._prepared: tuple[Sequence[Rows], _Run] | None = None
        self.adapters: LoraAdapters | None = None
        self.likeliest: Callable[[], list[int]] | None = None
        self.best = best_of_ranks(head, self.library, on_device=triton is not None)
        if self._layouts.kernel is not None or (triton is not None and self.choice.linears in ("triton", "cublaslt")):
            self._fuse()
        if config.adapts:
            assert self.library is not None
            self.adapters = LoraAdapters(self.model, adaptable, self.library, layers, self.shards)
        if streams is not None:
            streams.check(ranks, with_states=self.states is not None)
            self.hidden_states.stream_rows = StreamRows(self.model, shares[-1].stop, streams, self.device, self.dtype)
        # Ranks exchange what they make within the graphs, so they are connected first. Graphs hold the cache that serves.
        if self.shards is None and not config.rounds_cache:
            self._capture()

    def round_cache(self) -> None:
        """Hold keys and values as the settings say from now on: they are compared with transformers' unrounded before."""
        if self._config.rounds_cache:
            self._layouts.round_rows(self._rows)
            if self.shards is None:
                self._capture()

    def connect(self, exchange: Exchange) -> None:
        """Exchange with the other ranks of the stage from now on, if it has any: all call this, and capture their passes."""
        if self.shards is not None:
            self.shards.connect(RankExchange(exchange), exchange.rank_group)
            self._capture()

    def _capture(self) -> None:
        """Graphs of an earlier exchange end with it."""
        self._graphs = None
        # What is embedded anew lies elsewhere in each pass.
        if self.device.type == "cuda" and self.dtype != torch.float32 and self.embedded is None:
            self._graphs = self._captured(self._config)

    @property
    def captured(self) -> bool:
        """Whether its small passes are captured."""
        return self._graphs is not None

    def _make_current(self) -> None:
        """Triton launches its kernels on the GPU that is this thread's current one."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    def _recorded(self, longest: int) -> Recorded:
        entering = tokens = torch.arange(1, _TRIAL_ROWS + 1, device=self.device)[None]
        if not self.is_first:
            entering = torch.randn(1, _TRIAL_ROWS, self.hidden_size, dtype=self.dtype, device=self.device)
        # Without an output layer, what follows the decoder may fail.
        model = self.model if self.is_last else self.model.get_decoder()
        part = not (self.is_first and self.is_last)
        try:
            with embedding(self.embedded, tokens):
                return self.hidden_states.find_layers(lambda: record(model, entering, longest, part=part), _TRIAL_ROWS)
        except Exception as error:
            # Architectures that were never tested may fail in any way.
            reason = str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"{type(self.model).__name__} cannot be served: {' '.join(reason.split())}", about=type(self.model).__name__
            ) from error

    @torch.inference_mode()
    def _fuse(self) -> None:
        """Let our kernels compute whole layers, where their result is the same."""
        decoder, owner = self.model.get_decoder(), "fusing"
        self.memory.assign(owner, [0], 1)
        tokens = tuple(range(1, _TRIAL_ROWS + 1))
        entering = torch.tensor(tokens) if self.is_first else torch.randn(_TRIAL_ROWS, self.hidden_size, dtype=self.dtype)
        batch = [Rows(request_id=owner, context=0, tokens=tokens, logits=1)]

        def trial_pass() -> Running:
            running = self._running(batch, 0)
            self._decode(running, entering.to(self.device))
            return running

        try:
            done, reason = fuse_layers_of(decoder, self._layouts, self._calls, trial_pass)
        finally:
            self.memory.clear()
        log.info("%d whole layers run in our kernels%s", done, f"; the others do not: {reason}" if reason else "")

    @torch.inference_mode()
    def run(
        self, batch: Sequence[Rows], hidden: _Entering, earlier: _Entering = None, *, sought: Sought = WHOLE_ROWS
    ) -> torch.Tensor:
        """One pass through the stage's layers.

        Args:
            hidden: [rows, hidden size], the output of the stage before; None for the first stage.
            earlier: see ``HiddenStates.kept``.
            sought: what suffices of each row read, see ``best``.

        Returns:
            On the stage's device: [rows, hidden size] for the next stage; from the last one [rows read, vocabulary],
            logits in float32; of this rank's part of the vocabulary alone where ``best`` has found what is sought.

        Raises:
            ValueError: a tree has more than ``MAX_NODES`` nodes.
        """
        if self._prepared is None or self._prepared[0] is not batch:
            self.prepare(batch)
        assert self._prepared is not None
        runs, self._prepared, self.likeliest = partial(self._prepared[1], hidden, earlier), None, None
        made = runs() if self.best is None else self.best.rows_of(runs, batch, sought, lambda: self.likeliest)
        return made.float() if self.is_last else made

    @torch.inference_mode()
    def prepare(self, batch: Sequence[Rows]) -> None:
        """Lay out the pass that runs next: while the stage before still computes, this takes nobody's time.

        Raises:
            TargetLost: the ranks of the stage are to compute different passes.
            ValueError: a tree has more than ``MAX_NODES`` nodes.
        """
        self._make_current()
        if self.shards is not None:
            self.shards.agree(batch, [] if self.adapters is None else self.adapters.digests_of(batch))
        self.pool.settle()
        replay = None
        # No graph holds stream rows.
        if self._graphs is not None and not any(rows.ends for rows in batch):
            replay = self._graphs.lay_out(batch, self.hidden_states.asked_of(batch))
        if replay is not None:
            self._prepared = batch, partial(self._replay, replay, batch)
            return
        lacking = max(0, self.choice.min_rows - sum(len(rows.tokens) for rows in batch))
        self._prepared = batch, partial(self._launch, self._running(batch, lacking), batch)

    @property
    def takes_placed(self) -> bool:
        """Whether ``run_placed`` is possible: all layers attend, in our kernel, and a layer may get a single row."""
        return self._layouts.kernel is not None and self.choice.min_rows == 1 and self.states is None

    @torch.inference_mode()
    def run_placed(self, batch: Sequence[PlacedRows], tokens: Sequence[int], chosen: Sequence[int]) -> torch.Tensor:
        """One pass over rows whose places in the cache are given, one after the other.

        Returns:
            [chosen, vocabulary], the logits of these rows, float32.
        """
        self.pool.settle()
        laid_out = self._layouts.of_placed(batch)
        with answering(Running(laid_out, self._calls)):
            found = self.model(
                **self._inputs(self.model, laid_out, torch.tensor(tokens)),
                # Without any, the output layer is still asked for one row.
                logits_to_keep=torch.tensor(list(chosen) or [0]),
            )
        made: torch.Tensor = found.logits[0, : len(chosen)].float()
        return made

    def _replay(self, replay: Replay, batch: Sequence[Rows], hidden: _Entering, earlier: _Entering) -> torch.Tensor:
        """The pass by a captured graph."""
        made = replay(hidden)
        chosen = None if reads_all(batch) else rows_read(batch)
        if made.likeliest is not None:
            # Before anything else is launched, so that whoever needs no more waits for no more.
            self.likeliest = on_the_way(made.likeliest, chosen)
        if any(rows.layers for rows in batch):
            self.hidden_states.keep(batch, made.seen, earlier)
        if not self.is_last or chosen is None:
            return made.rows
        return made.rows[to_device(chosen, self.device, torch.int64)]

    def _launch(self, running: Running, batch: Sequence[Rows], hidden: _Entering, earlier: _Entering) -> torch.Tensor:
        """The pass kernel by kernel, padded to the fewest rows that a layer may get."""
        tokens = [token for rows in batch for token in rows.tokens]
        padding = len(running.laid_out.positions) - len(tokens)
        ids = torch.tensor(tokens + [0] * padding, device=self.device)
        entering = ids if hidden is None else nn.functional.pad(hidden.to(self.device), (0, 0, 0, padding))
        with nullcontext() if self.adapters is None else self.adapters.within(batch), embedding(self.embedded, ids[None]):
            if self.is_last:
                return self._logits(running, entering, batch, earlier)
            with self.hidden_states.kept(batch, 0, earlier):
                return self._decode(running, entering)[: len(tokens)]

    def _running(self, batch: Sequence[Rows], padding: int) -> Running:
        steps = None if self.states is None else self.states.begin(batch, padding)
        return Running(self._layouts.of(batch, padding, adapters=self.adapters), self._calls, steps)

    def _decode(self, running: Running, entering: torch.Tensor) -> torch.Tensor:
        """The layers' output, [rows, hidden size], from token ids, [rows], or hidden states of the stage before."""
        decoder = self.model.get_decoder()
        with answering(running):
            made: torch.Tensor = decoder(**self._inputs(decoder, running.laid_out, entering)).last_hidden_state[0]
        return made

    def _logits(self, running: Running, entering: torch.Tensor, batch: Sequence[Rows], earlier: _Entering) -> torch.Tensor:
        """[rows read, vocabulary], by the layers and the output layer."""
        chosen = rows_read(batch)
        # The output layer, too, gets no fewer rows than a layer may get.
        needed = chosen + [len(entering) - 1] * max(0, self.choice.min_rows - len(chosen))
        with (
            answering(running),
            self._streams_within(batch, len(entering), running),
            self.hidden_states.kept(batch, len(needed), earlier) as others,
        ):
            found = self.model(
                **self._inputs(self.model, running.laid_out, entering),
                logits_to_keep=torch.tensor(needed + others, device=self.device),
            )
        made: torch.Tensor = found.logits[0, : len(chosen)]
        return made

    def _streams_within(self, batch: Sequence[Rows], main: int, running: Running) -> AbstractContextManager[None]:
        stream_rows = self.hidden_states.stream_rows
        if stream_rows is None:
            return nullcontext()
        padding = main - sum(len(rows.tokens) for rows in batch)

        def lay_out(extended: Sequence[Rows], counts: Sequence[int]) -> attention.Pass:
            return self._layouts.of(extended, padding, counts, self.adapters)

        return stream_rows.within(batch, main, running, lay_out)

    def _inputs(self, module: nn.Module, laid_out: attention.Pass, entering: torch.Tensor) -> dict[str, Any]:
        name = "input_ids" if self.is_first else "inputs_embeds"
        return {**adapters.inputs_of(module, laid_out.positions[None]), "use_cache": False, name: entering[None]}

    @torch.inference_mode()
    def _captured(self, config: TargetConfig) -> Graphs:
        """Graphs of all passes that the settings allow. Shapes follow from the bucket alone: all rows have logits."""
        start, module = time.perf_counter(), self.model if self.is_last else self.model.get_decoder()
        # torch's functions would read all logits several times in every pass, for requests that draw, too.
        find, best = self._means.find(self.device) if self.is_last else None, self.best
        find, part = (find, nullcontext) if best is None else (best.finds(find), best.apart)

        def run(laid_out: attention.Pass, given: torch.Tensor, layers: Sequence[int], keep: Keep) -> Made:
            inner, steps = unwrapped(laid_out)
            with answering(Running(inner, self._calls, steps)), part(), self.hidden_states.of_all_rows(layers, keep) as seen:
                found = module(**self._inputs(module, inner, given))
            made: torch.Tensor = found.logits[0] if self.is_last else found.last_hidden_state[0]
            return Made(made, seen, None if find is None else find(made))

        of_rows, dtype = ((), torch.int64) if self.is_first else ((self.hidden_size,), self.dtype)
        buckets = stepped(self._layouts.buckets, self.states, config.pass_requests)
        # Ranks gather within their graphs: one that launched would be out of step. No GPU has captured states yet.
        captures = self.shards is not None or (config.kernels in ("triton", "cublaslt") and self.states is None)
        given = torch.empty(0, *of_rows, dtype=dtype, device=self.device)
        graphs = Graphs(buckets, run, given, required=self.choice.linears if captures else "")
        count = graphs.capture(largest_pass(config), {(), self.hidden_states.of_stage(config.observed_layers)})
        log.info("captured %d passes in %.1f s", count, time.perf_counter() - start)
        return graphs
