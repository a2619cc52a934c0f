"""A Llama or a Qwen3 of random weights over our kernels: what a target computes, by torch, Triton and transformers alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.inflate import Size
from services.machine.captured import captured
from services.verifier.attention import calls as attention
from services.verifier.attention.calls import Running, answering
from services.verifier.attention.recording import record
from services.verifier.kernels.triton.decoder_layer import fuse_layers
from services.verifier.kernels.triton.pass_shape import GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import RowLinear
from services.verifier.kernels.triton.tree_pass import TritonBuckets, TritonPass
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.target_port import Rows


class BareModel:
    """The model and its KV cache.

    Args:
        lengths: for how many tokens each of the requests "0", "1", ... has room.
        head_norms: a Qwen3, which has norms of heads.
        least_rows: of a product of tiles (``RowLinear``, ``PassShape.of``).

    Attributes:
        unsteady: passes that gave other bits when they ran again.
    """

    def __init__(
        self,
        size: Size,
        vocabulary: int,
        *,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: str,
        head_norms: bool = False,
        least_rows: int = 16,
    ) -> None:
        attention.register()
        self.unsteady, self._least_rows = 0, least_rows
        self.config = (Qwen3Config if head_norms else LlamaConfig)(
            hidden_size=size.width, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_size,
            vocab_size=vocabulary, max_position_embeddings=max(*lengths, 2048), attn_implementation=attention.NAME,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            kind = Qwen3ForCausalLM if head_norms else LlamaForCausalLM
            made: PreTrainedModel = kind._from_config(self.config, dtype=dtype)
        self._model = made.eval().requires_grad_(False)
        self.left = use_row_kernels(self._model, partial(RowLinear, least_rows=least_rows))
        self.bytes = sum(each.numel() * each.element_size() for each in self._model.parameters())
        self.bytes -= self._model.get_input_embeddings().weight.nbytes
        self._calls = record(self._model, torch.arange(1, 9, device=device)[None], max(lengths)).calls
        calls = [call for own in self._calls.values() for call in own]
        ends = list(itertools.accumulate(-(-length // BLOCK) for length in lengths))
        self.pool = KVPool(calls, rows=ends[-1] * BLOCK, dtype=dtype, device=torch.device(device), whole_rows=True)
        self._sizes = GpuAttentionSizes.of(calls, self.pool.device)
        for session, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            self.pool.assign(str(session), range(begin, end), 0)
        if reason := fuse_layers(self._model.get_decoder(), self._trial, self._calls)[1]:
            self.left.append(f"whole layers ({reason})")

    @torch.inference_mode()
    def logits(self, batch: Sequence[Rows]) -> torch.Tensor:
        """[rows, vocabulary] of a pass, which runs twice."""
        laid_out = self._laid_out(batch)
        made, again = self.launch(laid_out), self.launch(laid_out)
        self.unsteady += not torch.equal(made, again)
        return made

    def captured(self, batch: Sequence[Rows]) -> CapturedPass:
        """The pass over ``batch``, and over any other of its bucket, as a captured graph."""
        buckets = TritonBuckets(self.pool)
        shape = buckets.bucket(batch)
        assert shape is not None, "a pass that is too large to be captured"
        blocks = PassShape.of(batch, self._sizes, shape.rows, self._least_rows).block_rows
        made = CapturedPass(self, buckets.make(replace(shape, block_rows=blocks)))
        made.fill(batch)
        return made

    def _laid_out(self, batch: Sequence[Rows]) -> TritonPass:
        rows = sum(len(request.tokens) for request in batch)
        laid_out = TritonPass(self.pool, PassShape.of(batch, self._sizes, rows, self._least_rows))
        laid_out.fill(batch)
        return laid_out

    def _trial(self) -> Running:
        running = Running(self._laid_out([Rows(request_id="0", context=0, tokens=(1, 2, 3), logits=1)]), self._calls)
        self._run(running)
        return running

    @torch.inference_mode()
    def launch(self, laid_out: TritonPass) -> torch.Tensor:
        """[rows, vocabulary] of what is laid out, kernel by kernel."""
        return self._run(Running(laid_out, self._calls))

    def _run(self, running: Running) -> torch.Tensor:
        given = running.laid_out
        assert isinstance(given, TritonPass)
        given.enter()
        with answering(running):
            found = self._model(input_ids=given.tokens[None], position_ids=given.positions[None], use_cache=False)
        made: torch.Tensor = found.logits[0]
        return made


class CapturedPass:
    """A pass whose tensors stay where they are, as a graph; on a CPU, which has none, it is launched."""

    def __init__(self, model: BareModel, laid_out: TritonPass) -> None:
        self._model, self._laid_out = model, laid_out
        self._graph: torch.cuda.CUDAGraph | None = None
        laid_out.fill([])
        if model.pool.device.type == "cuda":
            self._capture()

    def fill(self, batch: Sequence[Rows]) -> None:
        """Lay out another pass of the same bucket."""
        self._laid_out.fill(batch)

    def replay(self) -> torch.Tensor:
        """[rows, vocabulary], padding included; valid until the next replay."""
        if self._graph is None:
            return self._model.launch(self._laid_out)
        self._graph.replay()
        return self._made

    @torch.inference_mode()
    def _capture(self) -> None:
        self._graph, self._made = captured(lambda: self._model.launch(self._laid_out))
