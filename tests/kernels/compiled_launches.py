"""What a layer of ours launches on a GPU at several numbers of rows, compiled as there: ``python -m tests.kernels.compiled_launches``.

Prints one JSON object per kernel and set of constants: all that else it is compiled by, of which there should be one, and how
the lanes of its sums are spread over threads. Run it with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_check.state_gate import kinds_of
from services.verifier.attention import calls as attention
from services.verifier.attention.calls import Running, answering
from services.verifier.attention.recording import record
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.kernels.triton.pass_shape import GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_steps import TritonSteps
from services.verifier.kernels.triton.tree_pass import TritonPass
from services.verifier.kv_cache.pool import KVPool
from services.verifier.loading.cut_layers import cut_layers, gather_between
from services.verifier.model.target_port import Rows
from services.verifier.recurrence.order import Line, Order
from services.verifier.stages.stage_ranks import StageRanks
from tests.kernels.triton_compiler import Launch, compile_for, layouts_of_sums, noted_launches

# Leaves of products lie apart where programs are few: of these models, with all rows but the last.
ROWS = (1, 3, 16, 33, 64, 65, 130, 256, 1800)
# Within one segment, and in two.
CONTEXTS = (8, 600)
# With and without norms of heads; the sizes of Qwen3-0.6B, and those of SmolLM-135M, whose heads are an odd number.
KINDS: dict[str, dict[str, int]] = {
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 128},
    "llama": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
              "head_dim": 64},
}  # fmt: skip
# The kernels whose sums run over lanes.
SUMMING = ("add_and_normalise", "rotate_write", "step_keyed", "divide_by_lengths")
_TOKENS = 2432


@torch.inference_mode()
def layer_launches(
    kind: str, sizes: dict[str, int], rows: Iterable[int], contexts: Iterable[int] = CONTEXTS, ranks: int = 1
) -> list[Launch]:
    """By a decoder layer of a kind of model, or by one rank's part of it, of so many rows behind so many tokens."""
    attention.register()
    config = AutoConfig.for_model(
        kind, **sizes, vocab_size=16, num_hidden_layers=1, attn_implementation=attention.NAME, pad_token_id=0
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shards = StageRanks(0, ranks)
    if ranks > 1:
        cut_layers(model, shards)
    # No kernel runs, but what norms and gates compute is looked at.
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.fill_(1 / 64)
    if ranks > 1:
        gather_between(model, shards)
    with noted_launches() as noted:
        use_row_kernels(model)
        calls = record(model, torch.arange(1, 6)[None], _TOKENS).calls
        call = next(iter(calls.values()))[0]
        pool = KVPool([call], rows=_TOKENS, dtype=torch.bfloat16, device=torch.device("cpu"), whole_rows=True)
        pool.assign("one", range(_TOKENS // 64), 0)
        sizes_of_calls = GpuAttentionSizes.of([call], pool.device)
        decoder = model.get_decoder()
        layer = RowDecoderLayer(decoder.layers[0], calls, decoder.norm)
        noted.clear()
        for count in rows:
            for context in contexts:
                batch = [Rows(request_id="one", context=context, tokens=(1,) * count, logits=1)]
                laid_out = TritonPass(pool, PassShape.of(batch, sizes_of_calls, count))
                laid_out.fill(batch)
                turns = torch.ones(1, count, call.key_size, dtype=torch.bfloat16)
                with answering(Running(laid_out, calls)):
                    layer(
                        torch.zeros(1, count, sizes["hidden_size"], dtype=torch.bfloat16), position_embeddings=(turns, turns)
                    )
    return list(noted)


def stepped() -> list[Launch]:
    """By layers with a state, of several numbers of rows, accepted ones, and requests."""
    with noted_launches() as noted:
        for kind in kinds_of("cpu").values():
            for rows in ROWS[:-1]:
                order = Order(
                    lines=[
                        Line(slot=0, accepted=rows % 5, chain=rows, parents=()),
                        *([Line(slot=1, accepted=0, chain=1, parents=(-1, -1))] if rows % 2 else []),
                    ],
                    padding=rows % 3, device=torch.device("cpu"), steps=TritonSteps(),
                )  # fmt: skip
                kind.recurrence.compute(
                    order, torch.zeros(2, *kind.recurrence.state_shape), kind.rows(order.accepted + order.rows)
                )
    return list(noted)


def described(launches: list[Launch]) -> Iterator[dict[str, object]]:
    """Each kernel and set of constants once."""
    alike: dict[str, list[Launch]] = {}
    for one in launches:
        alike.setdefault(f"{one.kernel} {one.constants}", []).append(one)
    for some in alike.values():
        first = some[0]
        layouts = layouts_of_sums(first.compiled()) if first.kernel in SUMMING else []
        yield {
            "kernel": first.kernel, "constants": first.constants, "sums": layouts,
            "specialised": sorted({one.specialised for one in some}),
        }  # fmt: skip


def main() -> None:
    """For the compute capabilities named, such as 80 90."""
    for capability in map(int, sys.argv[1:]):
        compile_for(capability)
        for kind, made in [*((kind, layer_launches(kind, KINDS[kind], ROWS)) for kind in KINDS), ("states", stepped())]:
            for one in described(made):
                print(json.dumps({"capability": capability, "kind": kind, **one}))


if __name__ == "__main__":
    main()
