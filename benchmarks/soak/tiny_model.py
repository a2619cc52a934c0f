"""A tiny random model with a real tokeniser, made on the spot: every part of a real one, in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "prompt lookup copies what was said before, and before that",
    "Größe, naïve, 東京, emoji 🙂🙃 and symbols <>{}[]",
)
# Settings under which a service has room for such a model, and starts in seconds.
SETTINGS = (
    "server.port=0",
    "verifier.kv_cache_tokens=4096",
    "verifier.max_model_len=512",
    "verifier.threads=1",
    "verifier.budget=fixed",
    "drafter.keep_calibration=false",
)
_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_tokenizer(folder: Path) -> int:
    """Write a byte-level tokeniser to ``folder``; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    size: int = tokenizer.get_vocab_size()
    return size


def make_tiny_model(folder: Path, **overrides: object) -> Path:
    """Write a two-layer Llama with grouped attention and a byte-level tokeniser to ``folder``."""
    vocab_size = make_tiny_tokenizer(folder)
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))
    model.save_pretrained(folder)
    return folder
