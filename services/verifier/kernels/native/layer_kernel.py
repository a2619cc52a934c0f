"""Whole decoder layers of the Llama kind, each in one call of a native kernel; see layer.c and ``whole_layers``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import nn

from services.model_files.weights.rounded_inputs import RoundedInputs, RoundedLinear
from services.verifier.attention.calls import Calls, Running, asked
from services.verifier.kernels.native.attention_kernel import AttentionLayer, NativePass
from services.verifier.kernels.native.layer_adapter import PARTS, LayerAdapter
from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.linear_kernel import PANEL, LinearStruct, NativeLinear
from services.verifier.kernels.native.low_rank_kernel import LowRank, SpanStruct
from services.verifier.kernels.native.rounding_struct import RoundingStruct, rounding_struct
from services.verifier.kernels.sharded_layers import ShardedLinear
from services.verifier.kernels.shared_products import shared_product
from services.verifier.kernels.whole_layers import only_call, part_of
from services.verifier.stages.stage_ranks import StageRanks

# Sizes must be whole vectors of the widest instruction set.
_COLUMNS = 16
# Places where numbers enter products: the order of layer.c.
_QUERY_KEY_VALUE, _ATTENTION_OUT, _GATE_UP, _DOWN = range(4)
_AS_THEY_ARE = rounding_struct(None)
# Relative difference of hidden states that another order of rounding may cause.
TOLERANCE = 1e-4


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _Parts(ctypes.Structure):
    _fields_ = [
        ("product", LinearStruct * 3),
        *[(name, ctypes.c_int64) for name in ("count", "width")],
        ("at", ctypes.c_int64 * 3),
    ]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *[(name, _Norm) for name in ("before_attention", "before_mlp", "of_query", "of_key")],
        *[(name, _Parts) for name in ("query_key_value", "gate_up")],
        *[(name, LinearStruct) for name in ("attention_out", "down")],
        *[(name, ctypes.c_int64) for name in ("hidden", "intermediate", "heads", "kv_heads", "size")],
        ("rounding", RoundingStruct * 4),
    ]


class _Adapted(ctypes.Structure):
    _fields_ = [
        ("span", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("inner", ctypes.c_void_p),
        ("inner_row", ctypes.c_int64),
    ]


class _Room(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("cosine", "sine", "normed", "query_key_value", "attended", "gate_up", "active", "rounded", "ordered")
    ]


class FusedLayer:
    """A layer's ``forward``, computed by the kernel.

    Raises:
        ValueError: the layer is of another kind; says what differs.
    """

    def __init__(self, kernels: Library, layer: nn.Module, calls: Calls) -> None:
        self._kernels = kernels
        self._call = kernels.functions.outrider_layer
        # Its two parts before a product that ranks have a shard of, and what adapters add to that.
        self._attend, self._gate = kernels.functions.outrider_layer_attend, kernels.functions.outrider_layer_gate
        self._adapt = kernels.functions.outrider_layer_adapt
        for function in (self._call, self._attend, self._gate, self._adapt):
            function.restype = None
        attention, mlp = part_of(layer, "self_attn"), part_of(layer, "mlp")
        (out, self._shards, round_out), (down, _, round_down) = _linear(attention, "o_proj"), _linear(mlp, "down_proj")
        ranks = 1 if self._shards is None else self._shards.count
        if type(getattr(mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
            raise ValueError("its activation is not SiLU")
        call = only_call(layer, calls)
        query_heads, kv_heads, size = call.heads, call.kv_heads, call.key_size
        hidden, intermediate = out.out_features * ranks, down.in_features // ranks
        if size % _COLUMNS or hidden % PANEL or intermediate % _COLUMNS:
            raise ValueError(f"its sizes do not suit: hidden {hidden}, heads of {size}, intermediate {intermediate}")
        if out.in_features != query_heads * size * ranks or call.value_size != size:
            raise ValueError("its projections are not those of its heads")
        widths = {"q_proj": query_heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        query_key_value, projections, round_states = _parts(attention, widths)
        gate_up, gates, round_normed = _parts(mlp, {"gate_proj": intermediate, "up_proj": intermediate})
        norms = [_norm(layer, name) for name in ("input_layernorm", "post_attention_layernorm")]
        norms += [_norm(attention, name) if hasattr(attention, name) else _Norm() for name in ("q_norm", "k_norm")]
        # Owners of the memory that the struct points to.
        self._held: list[nn.Module] = [layer, out, down, *projections, *gates]
        self._layer = _DecoderLayer(
            *norms, query_key_value, gate_up, out.struct, down.struct, hidden, intermediate, query_heads, kv_heads, size
        )
        # By place.
        self._roundings = (round_states, round_out, round_normed, round_down)
        self._rounding_structs = [rounding_struct(None if inputs is None else inputs.rounding) for inputs in self._roundings]
        self._rounds = any(inputs is not None for inputs in self._roundings)
        orders = any(one.order is not None for one in (out, down, *projections, *gates))
        # As wide as any product's input, where it is needed.
        widest = [max(hidden, query_heads * size, intermediate) if needed else 0 for needed in (self._rounds, orders)]
        self._widths = (hidden, query_key_value.width, query_heads * size, gate_up.width, intermediate, *widest)
        self._attention, self._size, self._out, self._down = call, size, out, down
        self._at = dict(zip(PARTS, (*query_key_value.at, 0, *gate_up.at[:2], 0), strict=True))
        self._of_streams: LayerAdapter | None = None

    def adapter(self, products: Mapping[str, LowRank]) -> LayerAdapter:
        """An adapter for this layer, by the names of its linear parts.

        Raises:
            ValueError: it has no such part.
        """
        return LayerAdapter(products, self._at)

    def adapt_streams(self, products: Mapping[str, LowRank]) -> None:
        """Add an adapter to the products of stream rows."""
        self._of_streams = self.adapter(products)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_ignored: object,
    ) -> torch.Tensor:
        """Hidden states, [1, rows, hidden size], to the same shape."""
        running = asked()
        assert isinstance(running, Running) and isinstance(running.laid_out, NativePass)
        laid_out = running.laid_out
        rows = hidden_states.shape[1]
        given = hidden_states.contiguous()
        cosine, sine = (table.contiguous() for table in position_embeddings)
        if cosine.shape != (1, rows, self._size) or not given.dtype == cosine.dtype == sine.dtype == torch.float32:
            raise NotImplementedError(f"its positions are rotated in {tuple(cosine.shape)}, {cosine.dtype}")
        widths = self._widths
        room = laid_out.room(widths)
        pointers = _Room(cosine.data_ptr(), sine.data_ptr(), *[buffer.data_ptr() for buffer in room])
        attention: AttentionLayer = laid_out.layer(self._attention)
        layer, by = self._layer, ctypes.byref
        adapted = self._adapted(laid_out, rows)
        if self._rounds:
            for place, inputs in enumerate(self._roundings):
                layer.rounding[place] = (
                    self._rounding_structs[place] if inputs is not None and inputs.active else _AS_THEY_ARE
                )
        arguments = (
            by(layer), by(laid_out.layout), by(attention), by(pointers), None if adapted is None else by(adapted),
            ctypes.c_int64(rows), ctypes.c_void_p(given.data_ptr()),
        )  # fmt: skip
        if self._shards is not None:
            _, _, attended, _, active, *_ = room
            self._attend(*arguments)
            after = self._multiplied(self._out, _ATTENTION_OUT, attended, given, adapted)
            self._gate(by(layer), by(pointers), arguments[4], ctypes.c_int64(rows), ctypes.c_void_p(after.data_ptr()))
            return self._multiplied(self._down, _DOWN, active, after, adapted)
        made = torch.empty_like(given)
        self._call(*arguments, ctypes.c_void_p(made.data_ptr()))
        return made

    def _multiplied(
        self, product: NativeLinear, place: int, own: torch.Tensor, before: torch.Tensor, adapted: _Adapted | None
    ) -> torch.Tensor:
        """What all ranks have made, times a matrix of which each has a shard; with what it is added to, ``before``, and what
        adapters add, in the order of a whole layer.
        """
        shards, size = self._shards, product.out_features
        assert shards is not None
        whole, inputs = shards.columns(own), self._roundings[place]
        made = product(whole if inputs is None else inputs(whole))
        if adapted is None:
            return shards.columns(made) + before
        # Adapters add to what a layer has added up, so this rank's columns of it come first: the same sums.
        made = made + before[0, :, shards.index * size : (shards.index + 1) * size]
        pointers = ctypes.c_void_p(whole.data_ptr()), ctypes.c_void_p(made.data_ptr())
        self._adapt(ctypes.byref(adapted), ctypes.c_int64(place), *pointers, ctypes.c_int64(size))
        return shards.columns(made)[None]

    def _adapted(self, laid_out: NativePass, rows: int) -> _Adapted | None:
        """The pass's rows that have adapters in this layer; None: there are none."""
        own = self._held[0]
        found = [(span.of_layers[own], span.first, span.rows) for span in laid_out.adapted if own in span.of_layers]
        if laid_out.stream_rows:
            assert self._of_streams is not None
            found.append((self._of_streams, rows - laid_out.stream_rows, laid_out.stream_rows))
        if not found:
            return None
        spans = (SpanStruct * len(found))(
            *[SpanStruct(ctypes.addressof(each.struct), first, rows) for each, first, rows in found]
        )
        width = max(each.width for each, _, _ in found)
        made = _Adapted(ctypes.addressof(spans), len(found), laid_out.room((width,))[0].data_ptr(), width)
        # What the struct points to lives as long as it does.
        made.held = spans
        return made


def _parts(module: nn.Module, widths: dict[str, int]) -> tuple[_Parts, list[NativeLinear], RoundedInputs | None]:
    """The products of the children with these numbers of outputs, and where their results begin: one shared product, or one
    each; and how what enters them is rounded.
    """
    found = {name: _unwrapped(part_of(module, name)) for name in widths}
    children, inputs = {name: child for name, (child, _) in found.items()}, [each for _, each in found.values()]
    if any(each is not inputs[0] for each in inputs):
        raise ValueError(f"what enters {', '.join(widths)} is not rounded in one way")
    shared = shared_product([*children.values()])
    if shared is not None:
        products = [_native(shared, "their product")]
        starts = [0, *accumulate(widths.values())][: len(widths)]
    else:
        products = [_native(child, name) for name, child in children.items()]
        starts = [0, *accumulate(one.struct.panels * PANEL for one in products)][: len(widths)]
    if sum(one.out_features for one in products) != sum(widths.values()):
        raise ValueError(f"{', '.join(widths)} do not have {sum(widths.values())} outputs")
    structs = (LinearStruct * 3)(*[one.struct for one in products])
    width = sum(one.struct.panels for one in products) * PANEL
    return _Parts(structs, len(products), width, (ctypes.c_int64 * 3)(*starts)), products, inputs[0]


def _linear(module: nn.Module, name: str) -> tuple[NativeLinear, StageRanks | None, RoundedInputs | None]:
    """A product, the ranks that have a shard of it (None: it is whole), and how what enters it is rounded."""
    part = part_of(module, name)
    shards = part.shards if isinstance(part, ShardedLinear) else None
    product, inputs = _unwrapped(part if shards is None else part_of(part, "own"))
    return _native(product, name), shards, inputs


def _unwrapped(part: nn.Module) -> tuple[nn.Module, RoundedInputs | None]:
    return (part.after_rounding, part.inputs) if isinstance(part, RoundedLinear) else (part, None)


def _native(part: nn.Module, name: str) -> NativeLinear:
    if not isinstance(part, NativeLinear) or part.struct.inputs != part.in_features:
        raise ValueError(f"{name} is not computed by our kernels")
    return part


def _norm(module: nn.Module, name: str) -> _Norm:
    part = part_of(module, name)
    weight, epsilon = getattr(part, "weight", None), getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32 or not isinstance(epsilon, float):
        raise ValueError(f"{name} is no root mean square norm")
    if getattr(part, "bias", None) is not None:
        raise ValueError(f"{name} has a bias")
    return _Norm(weight.data_ptr(), epsilon)
