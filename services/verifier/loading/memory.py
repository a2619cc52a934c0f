"""Checks before loading whether a target fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from services.machine.processor import free_memory
from services.verifier.attention.calls import MAX_NODES, TILE
from services.verifier.attention.fixed import MOST_ROWS, largest_pass, row_steps, rows_up
from services.verifier.config import Dtype, TargetConfig
from services.verifier.kernels.triton.pass_meta import SEGMENT
from services.verifier.kernels.triton.pass_shape import MOST_SUMS_BYTES
from services.verifier.loading.part_sizes import Exchanged, Mixture, SteppedRows, Uncut
from services.verifier.recurrence.room import captured_places, launched_places, noted_rows
from speculation.errors import ConfigurationError

_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
_GIB = 2**30
# Bytes that all captured passes share (results, intermediate tensors), and those of a layer in each.
_SHARED_BY_GRAPHS, _PER_GRAPH_AND_LAYER = 0.5 * _GIB, 2**18

# Bytes of NCCL's buffers in a process that has others beside it. Assumed: its channels have some 4 MiB each, and more for
# each peer.
_NCCL_BYTES = 0.5 * _GIB

# Of most models, and of one that ranks do not share.
_NO_STATES, _ALL_CUT, _ALONE = SteppedRows(), Uncut(), Exchanged()

# Requests that the checks at start open at the same time (``checks.exactness``).
_CHECKED = 3


def arithmetic_dtype(config: TargetConfig) -> torch.dtype:
    """The type of hidden states and of the key-value cache."""
    if config.quantised:
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def state_slots(config: TargetConfig) -> int:
    """Of how many requests the states of layers are held at the same time."""
    return max(config.pass_requests, _CHECKED)


def kept_states(config: TargetConfig) -> int:
    """How many states of prefixes are kept beside them."""
    return config.cache_tokens // config.mamba_block_size if config.enable_prefix_caching else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a model's size depends on.

    Attributes:
        layers: number of layers.
        per_layer: parameters in one layer, without those that it shares with others.
        others: parameters outside of the layers, including the embeddings.
        embeddings: parameters of the embeddings, of which a pass reads only its tokens' rows.
        stored_bytes: bytes per parameter in the model's files.
        cache_values_per_token: numbers per token in the key-value pool.
        cache_rows_per_token: rows of heads that these are; 0: not known.
        state_values_per_request: numbers per request in the states of layers, in float32.
        kept_bytes: bytes per parameter of a linear layer that keeps its weights as stored; None: no layer does.
        kv_heads: key-value heads of a layer; 0: not known.
        vocabulary: logits of a row; 0: not known.
        summed: numbers that attention on a GPU keeps of a row and segment at most (``pass_shape.summed``); 0: not known.
        longest: tokens of the longest request that the model was made for; 0: not known.
        mixtures: experts of which a pass reads those that its rows choose; all others are among ``per_layer`` alone.
        stepped: what layers with a state hold of rows.
        shared: parameters that several layers have in common. A stage holds them once, and reads them for each layer.
        again: how many more parameters layers have than there are, since they share some.
        uncut: what ranks do not share out evenly.
        gathers: what ranks exchange.
    """

    layers: int
    per_layer: int
    others: int
    embeddings: int
    stored_bytes: int
    cache_values_per_token: int
    cache_rows_per_token: int = 0
    state_values_per_request: int = 0
    kept_bytes: float | None = None
    kv_heads: int = 0
    vocabulary: int = 0
    summed: int = 0
    longest: int = 0
    mixtures: tuple[Mixture, ...] = ()
    stepped: SteppedRows = _NO_STATES
    shared: int = 0
    again: int = 0
    uncut: Uncut = _ALL_CUT
    gathers: Exchanged = _ALONE

    def weights(self, config: TargetConfig) -> float:
        """Bytes of a rank's weights in the largest stage: during loading on a CPU; on a GPU, which gets them as used."""
        if config.tensor_parallel_size > 1:
            return self._of_rank(config.tensor_parallel_size).weights(replace(config, tensor_parallel_size=1))
        layers = self.per_layer * -(-self.layers // config.stages) + self.shared
        if self.kept_bytes is not None:
            return (layers + self.others - self.embeddings) * self.kept_bytes + self.embeddings * 4
        if config.quantised and config.device != "cpu":
            # Embeddings stay bfloat16. torchao's int8 layers copy their weights to it, of which the output layer has most.
            wide = self.embeddings * (2 if config.dtype == "int8" and config.by_torchao else 1)
            return (layers + self.others - self.embeddings) * _BYTES[config.dtype] + wide * 2
        # On a CPU, weights that become int8 are loaded in their stored type.
        size = max(_BYTES[config.dtype], self.stored_bytes) if config.quantised else _BYTES[config.dtype]
        return (layers + self.others) * size

    def read_per_pass(self, config: TargetConfig, rows: int = 1) -> float:
        """Bytes of weights that a rank of each stage, all of these together, reads in a pass over so many rows.

        Of mixtures in expectation, see ``Mixture.read``; routers, and experts that get every row, always.
        """
        unread = sum(each.parameters - each.read(rows) for each in self.mixtures)
        read = self._multiplied(config) - unread / config.tensor_parallel_size
        return read * (_BYTES[config.dtype] if self.kept_bytes is None else self.kept_bytes)

    def multiplied(self, config: TargetConfig) -> float:
        """Parameters by which a rank of each stage, all of these together, multiplies a row."""
        others = sum(each.parameters - each.of_a_row for each in self.mixtures)
        return self._multiplied(config) - others / config.tensor_parallel_size

    def _multiplied(self, config: TargetConfig) -> int:
        """As ``multiplied``, as if a row chose all experts."""
        own = self._of_rank(config.tensor_parallel_size)
        return own.per_layer * own.layers + own.shared + own.again + own.others - own.embeddings

    def _of_rank(self, ranks: int) -> Shape:
        """What one rank holds of the weights."""
        return replace(
            self,
            per_layer=self.uncut.held(self.per_layer, ranks, self.kv_heads),
            others=(self.others - self.uncut.others) // ranks + self.uncut.others,
            embeddings=self.embeddings // ranks,
        )

    def cache(self, config: TargetConfig) -> float:
        """Bytes of the key-value cache of a rank of the largest stage."""
        # Ranks beyond the number of key heads hold the same ones.
        parts = config.stages * min(config.tensor_parallel_size, self.kv_heads or config.tensor_parallel_size)
        each: int = self.cache_values_per_token * arithmetic_dtype(config).itemsize
        if config.rounds_cache:
            # A byte for each number but the ones, and two scales for each row.
            each = self.cache_values_per_token + self.cache_rows_per_token * (2 * torch.float32.itemsize - 1)
        return each * config.cache_tokens / parts

    def states(self, config: TargetConfig) -> float:
        """Bytes of the largest stage's states, of requests and kept ones."""
        slots = state_slots(config) + kept_states(config)
        return self.state_values_per_request * slots * torch.float32.itemsize / config.stages


def sums_bytes(config: TargetConfig, shape: Shape) -> float:
    """Bytes of a GPU for the sums of attention's segments that are computed apart, which all passes share."""
    if config.device == "cpu" or config.attention_backend == "torch" or arithmetic_dtype(config) == torch.float32:
        return 0.0
    largest = largest_pass(config)
    if largest.positions <= SEGMENT:
        return 0.0
    # Ranks share the heads.
    each = torch.float32.itemsize * shape.summed / config.tensor_parallel_size
    parts = rows_up(min(MOST_ROWS, largest.rows)) * -(-largest.positions // SEGMENT)
    return min(MOST_SUMS_BYTES, each * parts) if each else MOST_SUMS_BYTES


def graph_bytes(config: TargetConfig, shape: Shape) -> float:
    """Bytes that a GPU's captured passes take in the largest stage. Assumed, not measured."""
    if config.device == "cpu" or arithmetic_dtype(config) == torch.float32:
        return 0.0
    largest = largest_pass(config)
    # Narrow and wide blocks, segments apart and not, with and without hidden states (``tree_pass.TritonBuckets``).
    kinds = 2 * (2 if largest.positions > SEGMENT else 1) * (2 if config.observed_layers else 1)
    graphs = kinds * len(row_steps(min(MOST_ROWS, largest.rows)))
    return _SHARED_BY_GRAPHS + sums_bytes(config, shape) + graphs * _PER_GRAPH_AND_LAYER * -(-shape.layers // config.stages)


def noted_bytes(config: TargetConfig, shape: Shape) -> float:
    """Bytes of the largest stage for the rows that captured passes note (``CapturedSteps``).

    A row of Qwen3-Next-80B is given 8192 numbers in each of 36 convolutions, and 8256 in each delta rule behind one:

    >>> config = TargetConfig(model_path="", device="cuda", dtype="bfloat16", pass_rows=2048)
    >>> noted = SteppedRows(noted=36 * (8192 + 8256), put_aside=32 * 128 * 128)
    >>> shape = Shape(
    ...     layers=48, per_layer=0, others=0, embeddings=0, stored_bytes=2, cache_values_per_token=0, stepped=noted
    ... )
    >>> f"{noted_bytes(config, shape) / 1e6:.0f} MB, {noted_bytes(config, shape) / 36e6:.1f} MB in each of its layers"
    '1213 MB, 33.7 MB in each of its layers'
    """
    return noted_rows(largest_pass(config)) * shape.stepped.noted * torch.float32.itemsize / config.stages


def stepped_bytes(config: TargetConfig, shape: Shape) -> float:
    """Bytes of a GPU for rows of trees in layers with a state, beside these states, in the largest stage.

    Rows are noted by captured passes, and once more: by launched ones, of as many nodes, or as copies for requests that sit
    out, which with stages are those of all other stages' passes. States are put aside for branches by the layer that runs,
    in a captured pass's memory and in a launched one's.
    """
    if config.device == "cpu" or not shape.stepped.noted:
        return 0.0
    largest = largest_pass(config)
    rows = noted_rows(largest)
    copied = min(rows * (max(2, config.stages) - 1), largest.requests * MAX_NODES)
    places = captured_places(rows) + launched_places(largest.rows, largest.requests)
    return noted_bytes(config, shape) * (1 + copied / rows) + places * shape.stepped.put_aside * torch.float32.itemsize


def buffer_bytes(config: TargetConfig, shape: Shape) -> float:
    """Bytes of a GPU that come and go, or belong to NCCL, in the largest stage. Assumed, not measured.

    A pass that no graph holds makes logits in its own type and in float32. Trials of kernels, before there is a cache, hold
    weights as large as the output layer's, in bfloat16, and rounded ones beside them. Ranks that may multiply by
    cuBLASLt compare their part of it with the whole.
    """
    if config.device == "cpu":
        return 0.0
    logits = config.pass_rows * shape.vocabulary * (arithmetic_dtype(config).itemsize + torch.float32.itemsize)
    tried = config.dtype != "float32" and config.kernels != "torch"
    each = torch.bfloat16.itemsize + (_BYTES[config.dtype] if config.quantised else 0)
    compared = config.tensor_parallel_size > 1 and config.dtype == "bfloat16" and config.kernels != "triton"
    trials = each * shape.embeddings * (1 / config.tensor_parallel_size + compared) if tried else 0.0
    return max(logits, trials - shape.cache(config)) + (_NCCL_BYTES if config.processes > 1 else 0.0)


def drafters_bytes(config: TargetConfig) -> float:
    """Bytes of a GPU for the hidden states that are kept there for drafters. Those of several processes are not."""
    return config.kept_state_bytes if config.states_stay and config.device != "cpu" and config.processes == 1 else 0.0


def _further_bytes(config: TargetConfig, shape: Shape) -> float:
    """Of captured passes and buffers."""
    return graph_bytes(config, shape) + buffer_bytes(config, shape) + stepped_bytes(config, shape)


def needed(config: TargetConfig, shape: Shape) -> float:
    """Bytes that a rank of the largest stage takes in all."""
    lasting = shape.weights(config) + shape.cache(config) + shape.states(config) + drafters_bytes(config)
    return lasting + _further_bytes(config, shape)


def check_fits(config: TargetConfig, shape: Shape, available: float, *, fp8: bool = False) -> None:
    """Check that the largest stage fits.

    Args:
        available: bytes for one stage.
        fp8: whether its device could serve with weights in fp8.

    Raises:
        ConfigurationError: it does not fit; says which settings would.
    """

    def fits(other: TargetConfig) -> bool:
        return needed(other, shape) <= available

    if fits(config):
        return
    ways = _ways_to_fit(config, shape.layers, fits, fp8=fp8)
    helps = (
        f"one of these would fit: {'; '.join(ways)}"
        if ways
        else "no one of verifier.dtype, stages and kv_cache_tokens helps alone"
    )
    raise ConfigurationError(
        f"the model does not fit: {_held_said(config, shape)}, {available / _GIB:.1f} GiB are free; {helps}", about="model"
    )


def _ways_to_fit(config: TargetConfig, layers: int, fits: Callable[[TargetConfig], bool], *, fp8: bool) -> list[str]:
    """Settings each of which would let the model fit, the others being as they are."""
    fewer = [count for halvings in range(1, 12) if (count := config.cache_tokens >> halvings) >= TILE]
    tokens = next((count for count in fewer if fits(replace(config, kv_cache_tokens=count))), None)
    smaller = [dtype for dtype in _BYTES if _BYTES[dtype] < _BYTES[config.dtype] and (fp8 or dtype != "fp8")]
    stages = next((n for n in range(config.stages + 1, layers + 1) if fits(replace(config, stages=n))), None)
    less = [config.pass_requests >> halvings for halvings in range(1, config.pass_requests.bit_length())]
    requests = next((count for count in less if fits(replace(config, pass_requests=count))), None)
    rarer = [config.mamba_block_size << doublings for doublings in range(1, kept_states(config).bit_length())]
    every = next((count for count in rarer if fits(replace(config, mamba_block_size=count))), None)
    ways = [f"verifier.kv_cache_tokens: {tokens}"] if tokens else []
    ways += [f"verifier.dtype: {dtype}" for dtype in smaller if fits(replace(config, dtype=dtype))]
    ways += [f"verifier.stages: {stages}, on other machines or GPUs"] if stages else []
    ways += [f"verifier.max_num_seqs: {requests}"] if requests else []
    return ways + ([f"verifier.mamba_block_size: {every}"] if every else [])


def _held_said(config: TargetConfig, shape: Shape) -> str:
    """What the memory would be for."""
    said = [
        f"{shape.weights(config) / _GIB:.1f} GiB of weights ({config.dtype}) and "
        f"{shape.cache(config) / _GIB:.1f} GiB of cache (verifier.kv_cache_tokens: {config.cache_tokens})"
    ]
    if states := shape.states(config):
        said.append(
            f"{states / _GIB:.1f} GiB of states of {state_slots(config)} requests (verifier.max_num_seqs) and "
            f"{kept_states(config)} prefixes (verifier.mamba_block_size)"
        )
    if further := _further_bytes(config, shape):
        said.append(f"{further / _GIB:.1f} GiB of captured passes and buffers")
    if drafters := drafters_bytes(config):
        kept = "(verifier.kept_feature_bytes, and what drafting keeps)"
        said.append(f"{drafters / _GIB:.1f} GiB of hidden states for drafters {kept}")
    whose = f"{config.processes} processes" if config.tensor_parallel_size > 1 else f"{config.stages} stages"
    return f"{', '.join(said)}{',' if len(said) > 1 else ''} in each of {whose}"


def with_cache_of(
    config: TargetConfig, shape: Shape, available: float, *, least: int = TILE, fp8: bool = False
) -> TargetConfig:
    """``config`` with the tokens of its KV cache: those of the setting, else as many as fit, in whole blocks.

    Args:
        available: bytes for one stage; of a GPU that says the number, its share (``share_of``).
        least: tokens below which it does not fit.
        fp8: see ``check_fits``.

    Raises:
        ConfigurationError: it does not fit; says which settings would.
    """
    if not config.sized_by_gpu:
        check_fits(config, shape, available, fp8=fp8)
        return replace(config, kv_cache_tokens=config.cache_tokens)

    def sized(blocks: int) -> TargetConfig:
        return replace(config, kv_cache_tokens=blocks * TILE, max_model_len=config.max_model_len or shape.longest or None)

    fewest = -(-least // TILE)
    check_fits(sized(fewest), shape, available, fp8=fp8)
    each = shape.cache(sized(1))
    # Without attention there is nothing to keep.
    most = fewest + int(available / each) if each else fewest
    while fewest < most:
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if needed(sized(middle), shape) <= available else (fewest, middle - 1)
    return replace(config, kv_cache_tokens=fewest * TILE)


def share_of(config: TargetConfig, total: float, free: float) -> float:
    """Bytes of a GPU that the target may take: what is free of its share, where that says the size of the KV cache."""
    return free - (1 - config.gpu_memory_utilization) * total if config.sized_by_gpu else free


def available_bytes(config: TargetConfig) -> float:
    """Free memory for the target on its GPU, or of this machine within the limits of its container."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return free_memory()
    free, total = torch.cuda.mem_get_info(device)
    return share_of(config, total, free)
