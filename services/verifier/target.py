"""The target: a transformers causal language model over our own key-value pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from services.machine import cores
from services.processors import build_pipeline
from services.verifier import attention
from services.verifier.attention import MAX_NODES
from services.verifier.config import TargetConfig
from services.verifier.kv_pool import KVPool
from services.verifier.linears import best_linear, pack_linears
from services.verifier.native import attention as native_attention
from services.verifier.tiled_attention import TiledPass
from speculation.acceptance import stop_token_ids
from speculation.choose import LogitsPipeline
from speculation.errors import ConfigurationError
from speculation.ports import Rows
from speculation.types import SamplingParams

log = logging.getLogger(__name__)

# With a single row, torch's matrix products take another path, with other rounding.
_MIN_ROWS = 2


class TransformersTarget:
    """Implements ``speculation.ports.Target``.

    Raises:
        ConfigurationError: the model cannot be loaded or served; says why.
    """

    def __init__(self, config: TargetConfig) -> None:
        # Said outright, since a cluster may have set OMP_NUM_THREADS to what it reserved rather than what there is.
        torch.set_num_threads(config.threads or cores())
        attention.register()
        self._device = torch.device(config.device)
        self._model = _load(config)
        self._min_rows = _pack(self._model, config)
        model_config = self._model.config.get_text_config()
        _refuse_unsupported(model_config)
        self.vocab_size: int = model_config.vocab_size
        self.eos_token_ids = _eos_token_ids(config.model_path, model_config)
        self.max_model_len = _max_model_len(config, model_config)
        heads: int = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
        head_size = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
        self._pool = KVPool(
            layers=model_config.num_hidden_layers,
            heads=heads,
            head_size=head_size,
            # The largest tree that a step may check lies behind the tokens, so that a full-length request fits too.
            rows=config.kv_cache_tokens + MAX_NODES,
            dtype=self._model.dtype,
            device=self._device,
        )
        self._kernel = native_attention.kernel_for(self._pool, model_config.num_attention_heads)
        self._probe()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def kernels(self) -> str:
        """Whose arithmetic: ``native`` or ``torch``."""
        return "torch" if self._kernel is None else "native"

    @property
    def pool(self) -> KVPool:
        """The key-value pool."""
        return self._pool

    def open(self, session_id: str, capacity: int) -> bool:
        """See ``Target``."""
        return self._pool.allocate(session_id, capacity)

    def close(self, session_id: str) -> None:
        """See ``Target``."""
        self._pool.release(session_id)

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """See ``Target``."""
        self._pool.move(session_id, [context + row for row in rows], context)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        """See ``Target``.

        Raises:
            ValueError: a tree has more than ``MAX_NODES`` nodes.
        """
        tokens = [token for rows in batch for token in rows.tokens]
        padding = max(0, self._min_rows - len(tokens))
        layout = self._lay_out(batch, padding)
        wanted, counts = _wanted_rows(batch)
        # As many rows as a layer may get, in the output layer as well.
        kept = wanted + [len(tokens) + padding - 1] * max(0, self._min_rows - len(wanted))
        logits = self._model(
            input_ids=torch.tensor([tokens + [0] * padding], device=self._device),
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(kept, device=self._device),
            outrider_pass=layout,
        ).logits[0, : len(wanted)]
        return list(logits.float().cpu().split(counts))

    def _lay_out(self, batch: Sequence[Rows], padding: int) -> attention.Pass:
        largest = max(len(rows.parents) for rows in batch)
        if largest > MAX_NODES:
            raise ValueError(f"a tree of {largest} nodes: at most {MAX_NODES}")
        if self._kernel is not None:
            return native_attention.lay_out(self._kernel, self._pool, batch, padding)
        return TiledPass(self._pool, batch, padding)

    def pipeline(self, params: SamplingParams, prompt_length: int) -> LogitsPipeline | None:
        """See ``Target``."""
        stop_ids = stop_token_ids(params, self.eos_token_ids)
        return build_pipeline(params, prompt_length=prompt_length, stop_ids=stop_ids)

    def _probe(self) -> None:
        """One tiny pass, so that a model that does not go through the attention interface fails now, not in mid-stream."""
        session, rows = "probe", 4
        self.open(session, rows)
        try:
            self.forward([Rows(session_id=session, context=0, tokens=tuple(range(1, rows + 1)), parents=(-1, -1), logits=1)])
            if not bool(
                self._pool.keys[:, self._pool.tiles_of(session)[0], :, :, : rows - 1].abs().sum(dim=(1, 2, 3)).gt(0).all()
            ):
                raise NotImplementedError("its attention layers do not call transformers' attention interface")
        except Exception as error:
            name = type(self._model).__name__
            raise ConfigurationError(f"{name} cannot be served: {error}") from error
        finally:
            self.close(session)


def _wanted_rows(batch: Sequence[Rows]) -> tuple[list[int], list[int]]:
    """Indices of the rows whose logits are asked for, and how many of them each request asked for."""
    wanted: list[int] = []
    end = 0
    for rows in batch:
        end += len(rows.tokens)
        wanted += range(end - rows.logits, end)
    return wanted, [rows.logits for rows in batch]


def _load(config: TargetConfig) -> PreTrainedModel:
    try:
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError(f"device is {config.device}, but torch sees no GPU here; use device: cpu")
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention.NAME,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot load the model at {config.model_path}: {error}") from error
    model.eval().requires_grad_(False).to(config.device)
    return model


def _pack(model: PreTrainedModel, config: TargetConfig) -> int:
    """Put faster linear layers in; returns how few rows a pass may have."""
    if config.device == "cpu" and config.dtype == "float32" and (best := best_linear()) is not None:
        make, min_rows = best
        log.info("packed %d linear layers", pack_linears(model, make))
        return min_rows
    return _MIN_ROWS


def _eos_token_ids(model_path: str, model_config: object) -> frozenset[int]:
    try:
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        eos = getattr(model_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _refuse_unsupported(model_config: object) -> None:
    """Refuse what would be computed without an error, but not as the model means it."""
    if getattr(model_config, "attention_chunk_size", None):
        raise ConfigurationError("models with chunked attention (attention_chunk_size) are not supported")
    rope = getattr(model_config, "rope_parameters", None) or {}
    if "longrope" in str(rope.get("rope_type", "")):
        # transformers chooses its factors by the longest position of the pass: one request would change another's tokens.
        raise ConfigurationError("models with longrope positions are not supported")


def _max_model_len(config: TargetConfig, model_config: object) -> int:
    native = int(getattr(model_config, "max_position_embeddings", config.kv_cache_tokens))
    wanted = config.max_model_len or min(native, config.kv_cache_tokens)
    if wanted > native:
        raise ConfigurationError(f"max_model_len is {wanted}: the model was made for at most {native} tokens")
    if wanted > config.kv_cache_tokens:
        raise ConfigurationError(
            f"max_model_len is {wanted}: kv_cache_tokens, {config.kv_cache_tokens}, must not be below it"
        )
    return wanted
