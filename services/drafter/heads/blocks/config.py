"""What a block drafter computes, as one value, and the tensors that this takes; read without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.head_fields import Shapes

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    """A block drafter.

    Attributes:
        layer: its sizes, and what its decoder layers compute.
        block_size: rows of a block: the last committed token, and masks behind it.
        mask_token_id: the token that stands where one is to be guessed.
        from_anchor: whether row j guesses the token behind its own position, the last committed token's row the first one
            (DSpark). Otherwise row j guesses the token of its own position, and the first row guesses nothing (DFlash).
        causal: by layer, whether a row sees the rows of the block before it alone; otherwise it sees all of them.
        windows: by layer, a row sees positions nearer than this; None: all.
        embedding_scale: factor on the embeddings.
        markov_rank: DSpark: rank of the matrix by which the token before changes a row's logits; 0: there is none.
        markov_kind: whether the row weighs what the token before says (gated), or all tokens of the block before it count
            (rnn).
        confidence: DSpark: whether a head says how sure each row is.
        confidence_with_markov: whether that head reads the token before.
        selector_rank: DFlash2: rank of the matrix by which a row and the token before choose among the row's
            ``selector_top_k`` likeliest tokens; 0: there is none.
        conv_kernel_size: DFlash2: rows of a block that its layers' convolutions join; 0: there are none.
        conv_group_size: neighbouring numbers of a row that share the part of a kernel which depends on the row.
        gru_size: Domino: size of the state that tells a row all tokens of the block before it; 0: there is none.
        gru_inner_size: width between that state and the logits.
        gru_from: how many levels go without.
        logit_scale, softcap: what is done to the logits: logits * logit_scale, then softcap * tanh(logits / softcap).
    """

    layer: HeadConfig
    block_size: int
    mask_token_id: int
    from_anchor: bool = False
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 1
    gru_size: int = 0
    gru_inner_size: int = 0
    gru_from: int = 0

    @property
    def levels(self) -> int:
        """Tokens ahead that a block guesses."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def cut(self, levels: int) -> BlockConfig:
        """The same with at most ``levels`` levels, where no row of them knows of a row behind it. Otherwise as it is."""
        if not all(self.causal) or self.conv_kernel_size:
            return self
        return replace(self, block_size=min(self.block_size, levels if self.from_anchor else levels + 1))


def shapes_of(config: BlockConfig, held: Shapes) -> dict[str, tuple[int, ...]]:
    """Of each tensor that a checkpoint must hold, the shape.

    Args:
        held: shapes of those that it holds: an output layer over all tokens may come with a draft vocabulary.
    """
    layer, own = config.layer, config.layer.layer_shapes
    size = layer.hidden_size
    wanted: dict[str, tuple[int, ...]] = {"fc.weight": (size, layer.state_size), "hidden_norm.weight": (size,)}
    wanted |= {"norm.weight": (size,)}
    if kernel := config.conv_kernel_size:
        written = 2 * kernel * (size // config.conv_group_size)
        for conv in ("attention_conv", "mlp_conv"):
            own |= {f"{conv}.base_kernel": (2, kernel, size), f"{conv}.kernel_projection.weight": (written, size)}
    for number in range(layer.num_layers):
        wanted |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    if config.markov_rank:
        wanted["markov_head.markov_w1.weight"] = (layer.vocab_size, config.markov_rank)
        wanted["markov_head.markov_w2.weight"] = (layer.draft_vocab_size, config.markov_rank)
    if config.selector_rank:
        books = ("predecessor_codebook", "successor_codebook")
        wanted |= {f"candidate_selector.{name}": (layer.vocab_size, config.selector_rank) for name in books}
        wanted["candidate_selector.hidden_projection.weight"] = (config.selector_rank, size)
    if (rank := config.markov_rank) and config.markov_kind == "gated":
        wanted |= {"markov_head.gate_proj.weight": (rank, size + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and config.markov_kind == "rnn":
        wanted |= {"markov_head.joint_proj.weight": (3 * rank, size + 2 * rank), "markov_head.joint_proj.bias": (3 * rank,)}
    if gru := config.gru_size:
        wanted |= {"prefix_gru.weight_ih_l0": (3 * gru, size), "prefix_gru.weight_hh_l0": (3 * gru, gru)}
        wanted["embed_proj.0.weight"] = (config.gru_inner_size, size + gru)
        wanted["embed_proj.2.weight"] = (layer.draft_vocab_size, config.gru_inner_size)
    if config.confidence:
        read = size + (config.markov_rank if config.confidence_with_markov else 0)
        wanted |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    if layer.own_embedding:
        wanted["embed_tokens.weight"] = (layer.vocab_size, size)
    if layer.own_output:
        every = held["lm_head.weight"][0] == layer.vocab_size
        wanted["lm_head.weight"] = (layer.vocab_size if every else layer.draft_vocab_size, size)
    return wanted
