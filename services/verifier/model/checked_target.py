"""What is known of a target before a weight is read: that it can be served here, and how long its cache and requests are."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from services.model_files.folder import reading
from services.model_files.generation_config import GenerationConfig, read_generation_config
from services.verifier.config import TargetConfig, check_backends
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.loading.load_model import split_layers
from services.verifier.loading.memory import kept_states
from services.verifier.loading.model_config import check_files, longest_request, read_config
from services.verifier.loading.model_size import check_memory
from services.verifier.model.gpu_here import check_device
from services.verifier.stages.ways import device_of_process
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTarget:
    """A target that fits.

    Attributes:
        config: with the longest request, and the tokens of the cache, that fit.
        has_states: some of its layers have a state; of the whole model, whatever a stage holds of it.
    """

    config: TargetConfig
    vocab_size: int
    has_states: bool
    generation: GenerationConfig


def checked(config: TargetConfig) -> CheckedTarget:
    """Check a target, and log what is found.

    Raises:
        ConfigurationError: the model cannot be served here as it is set; says why.
    """
    check_backends(config)
    check_device(config)
    with reading(f"load the model at {config.model_path}", about=config.model_path):
        check_files(config)
        model_config = read_config(config).get_text_config()
        # Refuse a wrong number of stages before any is started.
        split_layers(config)
        least, longest = config.max_model_len or BLOCK, longest_request(config, model_config)
        # Captured passes, and the memory that they take, depend on the longest request.
        config = replace(config, max_model_len=longest)
        # Of the last stage's GPU: this process loads that stage, and a question to another GPU would take memory there.
        on_last = replace(config, device=device_of_process(config.device, config.processes - 1, config.processes))
        fitted, shape = check_memory(on_last, least)
        # The other stages' GPUs are as large.
        config = replace(config, kv_cache_tokens=fitted.cache_tokens, max_model_len=min(longest, fitted.cache_tokens))
        has_states = shape.state_values_per_request > 0
        if config.draft_adapter is not None and has_states:
            raise ConfigurationError(
                "drafts by rows of noise in the target's passes, and the target has layers with a state; leave it out",
                field="drafter.models",
                verb="names",
                value=config.draft_adapter,
            )
        vocab_size: int = model_config.vocab_size
        generation = read_generation_config(
            Path(config.model_path), config.generation_config, config.override_generation_config, vocab_size=vocab_size
        )
    for note in generation.notes:
        log.warning("%s", note)
    log.info("the key-value cache holds %d tokens", config.cache_tokens)
    if config.enable_prefix_caching and has_states:
        log.info("of prefixes, %d states are kept, every %d tokens", kept_states(config), config.mamba_block_size)
    return CheckedTarget(config=config, vocab_size=vocab_size, has_states=has_states, generation=generation)
