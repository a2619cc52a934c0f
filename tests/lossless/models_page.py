"""docs/models.md: which models are served, by the names that people know and by the types of transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.verifier.config import Dtype

# Types of which transformers cannot make a small model from a configuration alone; what is given out for them is refused
# all the same.
NOT_MADE = {
    "blt": "transformers itself fails to run it",
    "dots3_note": "its vision part cannot be made small",
    "gemma3n": "its vision part needs the package timm",
    "gemma4_assistant": "it drafts for another model, from whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts for another model, from whose keys and values it reads",
    "musicgen": "transformers makes its decoder from another configuration",
    "musicgen_melody": "transformers makes its decoder from another configuration",
}

# Well-known models, and the type that their configuration names.
WELL_KNOWN = (
    ("Llama 2, 3, 3.1, 3.2 and 3.3 (text), TinyLlama, SmolLM2, Yi 1.5, Vicuna, DeepSeek-R1-Distill-Llama", "llama"),
    ("Llama 4 (text)", "llama4_text"),
    ("Qwen 2, Qwen 2.5, DeepSeek-R1-Distill-Qwen", "qwen2"),
    ("Qwen 3 (0.6B to 32B)", "qwen3"),
    ("Qwen 3 with experts (30B-A3B, 235B-A22B)", "qwen3_moe"),
    ("Qwen3-Next", "qwen3_next"),
    ("Qwen 3.5", "qwen3_5"),
    ("Qwen 3.5 with experts", "qwen3_5_moe"),
    ("Mistral 7B, Mistral Nemo, Mistral Small (text)", "mistral"),
    ("Mixtral 8x7B, 8x22B", "mixtral"),
    ("Gemma", "gemma"),
    ("Gemma 2", "gemma2"),
    ("Gemma 3 (text)", "gemma3_text"),
    ("Gemma 3n (text)", "gemma3n_text"),
    ("Phi-2", "phi"),
    ("Phi-3, Phi-3.5 mini, Phi-4", "phi3"),
    ("Phi-3.5-MoE", "phimoe"),
    ("DeepSeek-V2", "deepseek_v2"),
    ("DeepSeek-V3, DeepSeek-R1", "deepseek_v3"),
    ("DeepSeek-V3.2", "deepseek_v32"),
    ("gpt-oss 20b, 120b", "gpt_oss"),
    ("GPT-2", "gpt2"),
    ("SmolLM3", "smollm3"),
    ("OLMo 2", "olmo2"),
    ("OLMo 3", "olmo3"),
    ("OLMo Hybrid", "olmo_hybrid"),
    ("GLM-4 (0414)", "glm4"),
    ("GLM-4.5", "glm4_moe"),
    ("Granite 3", "granite"),
    ("Granite 4 (hybrid)", "granitemoehybrid"),
    ("Command R", "cohere"),
    ("Command R7B, Command A", "cohere2"),
    ("Falcon 7B, 40B", "falcon"),
    ("Falcon-H1", "falcon_h1"),
    ("StarCoder2", "starcoder2"),
    ("Seed-OSS", "seed_oss"),
    ("ERNIE 4.5", "ernie4_5"),
    ("MiniMax-Text-01", "minimax"),
    ("MiniMax-M2", "minimax_m2"),
    ("Kimi Linear", "kimi_linear"),
    ("Mamba 2", "mamba2"),
    ("Nemotron-H", "nemotron_h"),
    ("RecurrentGemma", "recurrent_gemma"),
    ("RWKV-4", "rwkv"),
    ("Zamba2", "zamba2"),
    ("Jamba", "jamba"),
    ("LFM2", "lfm2"),
)

# Refusals that speak of the tiny model of the test, and what they say of every model of the type.
_OF_THE_TYPE = {
    r"the model was made for at most -1 tokens": "its configuration names no longest text (max_position_embeddings: -1)",
    r"config\.axial_pos_shape": "its position embeddings fit texts of one length alone",
    r"in a second chunk, from position \d+ on, it computes something else than its own eager attention": (
        "it computes something else in chunks than in one piece, so a text cannot be continued"
    ),
}

HEAD = """# Models

For those who ask whether a model is served: one that they know by name first, every type of transformers' below.

| model | its `model_type` | served |
|---|---|---|
{known}

Names that are not in this table: `config.json` in the model's folder says its `model_type`, and the second table has all of them.
What is published quantised (FP8, AWQ, GPTQ, compressed-tensors, MXFP4, bitsandbytes, HQQ) is served as the float model that it stands for:
[Quantised checkpoints](how-to/quantised-checkpoints.md). Those that also round what enters their layers have not run on a GPU yet, and mixtures
whose experts round are served on CPUs alone.

## Every type

Which of the causal language models of transformers {version} are served, as seen on a tiny random one of each type: loaded,
asked for {answer} tokens after prompts longer than every window, plainly and from trees, alone and three at a time, and compared
with `generate` token for token. `python -m tests.lossless.architectures > docs/models.md` made this table, in some minutes;
tests/lossless/test_architectures.py holds it to what it sees, and to the types of the installed transformers.

- **served**: what is not, is refused at the start, for this reason. Whatever is loaded is also compared with its own eager
  attention at every start (`services/verifier/checks/guard.py`), so that a type, or a configuration of one, that this table does not
  know is served rightly or refused, too.
- **bits**: `exact` means that a token's logits are the same bits, whatever shares its pass, so that plain and speculative
  decoding say the same under every seed; `up to near ties` that they are the same up to rounding, so that two tokens
  that are equally likely up to the last bits may be swapped. In float32, with our own kernels.
- **stages**: whether the layers can be split over processes, one for each layer at most. Which types also share each layer over ranks
  stands in [Scaling](how-to/scaling.md#ranks).
- **layers**: of which layers drafters can be given hidden states: of all by their number, or of the last alone.
- **dtypes**: what `verifier.dtype` may be on a CPU; on a GPU also fp8, which is not tried here.

What would be needed for the others:

- *Encoder-decoders* read a second text, or a picture or sound, which requests cannot give. Their decoders alone, and others that
  count their positions themselves instead of taking those that they are given, can compute a text from its beginning only; a
  branch of a tree, or the second request of a pass, begins elsewhere.
- *Recurrent and hybrid layers* carry a state beside keys and values, or instead of them. Short convolutions, the selective scans of
  Mamba and Mamba-2, gated delta rules (Qwen3-Next, Kimi Linear), lightning attention (MiniMax), the linear units of RecurrentGemma
  and RWKV's weighted means are served: they step row by row, in one order for prompts, plain decoding and trees, and a tree's
  branches from their parent's state; without streams in the pass. On a GPU our Triton kernels step them, which no GPU has run yet
  ([what is known](gpu-kernels.md#layers-with-a-state)). Prefixes are shared up to a kept state
  (`verifier.mamba_block_size`). xLSTM and ZAYA need steps of their own; Inkling's layers add a bias to their scores that depends on the query. Of Zamba2 and Nemotron-H,
  transformers holds time steps above `time_step_min` in prompts, and not in what it decodes after them; here they always are.
- *Stages*: models that are not split call their parts otherwise than stages know (the families of GPT-2, BERT and OPT, which also
  add positions to embeddings), or have layers that read more than the hidden states before them: those of Gemma 3n and 4 inputs of
  each layer, or other layers' keys. Zamba's read the embeddings of the tokens, so every stage of theirs holds that matrix, and its own
  copy of the block that layers share, once. Of weights that transformers splits (LARA mini) no part can be read.
- *Sparse and compressed attention* (indexers, compressed keys) chooses what a row sees by the keys of all rows; the pool
  would have to hold the indexers' keys as well, and the choice would have to be the same in a tree
  ([what it would take](log/2026-11.md#2026-11-29-what-sparse-attention-by-an-indexer-would-take)).

| type | served | bits | stages | layers | dtypes |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a type.

    Attributes:
        refusal: why it is not served; empty: it is.
        wrong: what was served wrongly; must be empty.
        exact: whether a row's logits are the same bits, whatever shares its pass.
        near_ties: answers that left transformers' where two tokens were equally likely up to rounding.
        stages: why its layers cannot be split over stages; empty: they can.
        dtypes: those it is served in; others are missing.
        layers: why hidden states can be had of the last layer alone; empty: of every layer.
    """

    refusal: str = ""
    wrong: str = ""
    exact: bool = False
    near_ties: int = 0
    stages: str = ""
    dtypes: tuple[Dtype, ...] = ()
    layers: str = ""


def row(model_type: str, found: Outcome) -> str:
    """The type's line of docs/models.md."""
    if found.wrong:
        return f"| {model_type} | **wrong: {found.wrong}** | | | | |"
    if found.refusal:
        return f"| {model_type} | no: {reason(model_type, found.refusal)} | | | | |"
    bits = "exact" if found.exact else "up to near ties"
    stages, layers = "no" if found.stages else "yes", "last" if found.layers else "all"
    return f"| {model_type} | yes | {bits} | {stages} | {layers} | {', '.join(found.dtypes)} |"


def reason(model_type: str, refusal: str) -> str:
    """Why models of a type are not served, from the refusal of a tiny one: a sentence about the type, not about the test."""
    if model_type in NOT_MADE:
        return f"not tried, since {NOT_MADE[model_type]}"
    for said, meant in _OF_THE_TYPE.items():
        if re.search(said, refusal):
            return meant
    # How far a model is off depends on the processor; that it is, does not.
    refusal = re.sub(r", by [\d.]+ of the spread", "", refusal.replace("|", "/"))
    return refusal.removeprefix("cannot load the model at its folder: ")


def page(rows: Sequence[str], version: str, answer: int) -> str:
    """The whole page.

    Args:
        rows: by ``row``, one for each type.
        answer: tokens that were asked of each.
    """
    served = dict(_cells(line) for line in rows)
    known = [f"| {names} | `{kind}` | {served[kind]} |" for names, kind in WELL_KNOWN]
    return HEAD.format(version=version, answer=answer, known="\n".join(known)) + "\n".join(rows)


def _cells(line: str) -> tuple[str, str]:
    """A type, and whether it is served: with which bits, or the beginning of the reason against it."""
    kind, served, bits, *_ = (cell.strip() for cell in line.strip("|").split("|"))
    if served == "yes":
        return kind, f"yes, {'exact bits' if bits == 'exact' else bits}"
    return kind, served.partition("; ")[0].partition(", which would need")[0]
