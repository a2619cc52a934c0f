"""Training data of a tiny target, made from its own passes in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.model_files.folder import tokenizer_digest
from training.data_folder import weights_digest
from training.data_manifest import DataManifest, DataSampling, DataTarget, write_manifest
from training.open_run import OpenedModel, TrainingTarget, open_model
from training.recipe import AnyRecipe
from training.shards import TrainingSequence, write_shard
from training.vocabulary import ChosenVocabulary, build_vocabulary

DOMAINS = ("code", "talk")


def make_tiny_data(
    target: Path, folder: Path, *, sequences: int = 48, length: int = 40, layers: tuple[int, ...] = (-1,)
) -> DataManifest:
    """Greedy answers of the target to random prompts, with its states of these layers, in two shards."""
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(target)
    random = torch.Generator().manual_seed(1)
    made = []
    for number in range(sequences):
        prompt = torch.randint(4, model.config.vocab_size, (1, 6 + number % 5), generator=random)
        with torch.inference_mode():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_length=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            found = model.model(tokens, output_hidden_states=True)
            every = [found.last_hidden_state if layer == -1 else found.hidden_states[layer + 1] for layer in layers]
            states = torch.cat(every, dim=-1)[0]
        known = np.ones(tokens.shape[1], dtype=np.bool_)
        known[-1] = False
        made.append(
            TrainingSequence(
                tokens=tokens[0].numpy().astype(np.int32),
                prompt_length=prompt.shape[1],
                states=states.numpy().astype(np.float16),
                known=known,
                domain=DOMAINS[number % 2],
                temperature=0.0,
            )
        )
    half = sequences // 2
    shards = tuple(
        write_shard(folder, number, part, DOMAINS, [index % 6 == 0 for index in range(len(part))])
        for number, part in enumerate((made[:half], made[half:]))
    )
    manifest = DataManifest(
        target=DataTarget(
            name=str(target),
            weights_sha256=weights_digest(target),
            tokenizer_sha256=tokenizer_digest(target),
            vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
            eos_token_ids=(0,),
        ),
        layers=layers,
        sampling=DataSampling(
            max_new_tokens=length, samples_per_prompt=1, max_prompt_tokens=64, shard_sequences=half, seed=0
        ),
        domains=DOMAINS,
        prompts=sequences,
        prompts_sha256="0" * 64,
        shards=shards,
    )
    write_manifest(folder, manifest)
    return manifest


def open_tiny(
    recipe: AnyRecipe, target: Path, data: Path, manifest: DataManifest, size: int = 128
) -> tuple[OpenedModel, ChosenVocabulary]:
    """An untrained model of a recipe, for data of ``make_tiny_data``."""
    vocabulary = build_vocabulary(data, size)
    return open_model(recipe, TrainingTarget(folder=target, floats=lambda: target), manifest, vocabulary, "cpu"), vocabulary
