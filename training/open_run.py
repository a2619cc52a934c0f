"""Puts a run together: target, draft vocabulary, model and what it learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from services.drafter.config import StopConfig
from services.drafter.draft_model.model import DraftLM
from services.drafter.draft_model.source import DraftModelSource
from services.drafter.draft_model.vocabulary_map import VocabularyMap
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.source import BlockSource
from services.drafter.heads.draft_vocabulary import SharedOutput
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.files.head_config import FINAL, TargetShape
from services.drafter.heads.files.target_rows import TargetRows, read_target_rows, read_target_shape
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.medusa.source import MedusaSource
from services.drafter.heads.streams.source import StreamSource
from services.drafter.heads.streams.streams import Streams
from services.drafter.sources.interfaces import ModelSource
from services.drafter.stopping.lengths import Static
from speculation.errors import ConfigurationError
from training.block_learner import BlockLearner
from training.data_folder import weights_digest
from training.data_manifest import DataManifest, check_layers, read_data_manifest
from training.head_learner import HeadLearner
from training.initial import new_block_drafter, new_eagle3_head, new_head
from training.layers_learner import LayersLearner, new_draft_model
from training.learner import Learner
from training.level_models import GuessingHeads, GuessingStreams
from training.levels_learner import Guessing, LevelsLearner
from training.recipe import (
    AnyRecipe,
    BlockRecipe,
    Eagle3Recipe,
    HeadRecipe,
    LayersRecipe,
    MedusaRecipe,
    StreamsRecipe,
    UnrolledRecipe,
    parse_recipe,
)
from training.shards import TrainingSequence
from training.snapshots import RunState, StartRecord
from training.state_columns import StateColumns, columns_of
from training.vocabulary import ChosenVocabulary, read_vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTarget:
    """The model whose text is learnt from.

    Attributes:
        folder: its weights, as it is served.
        floats: gives a folder with the same weights as floats, for transformers.
    """

    folder: Path
    floats: Callable[[], Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model on its device, with what it is measured against.

    Attributes:
        output: float32 [V, h], all of the target's output rows.
        columns: of the states that its sequences have.
        inside: gives the states [B, T, h] inside the target that its source reads, of tokens [B, T]; None: it reads those
            that the data hold.
    """

    recipe: AnyRecipe
    learner: Learner
    output: torch.Tensor
    columns: StateColumns
    inside: Callable[[torch.Tensor], torch.Tensor] | None = None
    manifest: DataManifest
    vocabulary: ChosenVocabulary

    def source(self) -> ModelSource:
        """The model as the drafter serves it; a draft model is no longer in training then.

        Raises:
            ConfigurationError: it never serves: its target says other things than the text that it learnt from.
        """
        module, window = self.learner.module, self.recipe.max_rows
        if isinstance(module, PreTrainedModel):
            ids = self.vocabulary.ids
            lm = DraftLM(module, Path(self.manifest.target.name), ids.tolist())
            return DraftModelSource(
                lm,
                VocabularyMap(ids, ids, self.manifest.target.vocab_size),
                Static(StopConfig().num_assistant_tokens),
                longest=window,
            )
        if isinstance(module, FeatureHead):
            return FeatureSource("trained", module, window=window)
        if isinstance(module, BlockDrafter):
            return BlockSource(module, window=window)
        if isinstance(module, MedusaHeads):
            return MedusaSource(module)
        assert isinstance(module, Streams)
        if module.config.shared:
            raise ConfigurationError(
                "the target is tuned with the streams, so that they draft for no target that is served: replay no trees "
                "(--trees '')",
                field="the recipe's main_weight",
                value=self.recipe.model_dump()["main_weight"],
            )
        return StreamSource(module, window=window)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states its source reads, see ``Features.layers``."""
        module = self.learner.module
        return (module.config.state_layer,) if isinstance(module, Streams) else self.columns.inputs or (FINAL,)

    def as_served(self, sequence: TrainingSequence) -> TrainingSequence:
        """The sequence with the states of ``layers`` alone."""
        if self.inside is None:
            read = self.columns.read if self.columns.inputs else self.columns.target
            return replace(sequence, states=sequence.states[:, read])
        device = self.output.device
        states = self.inside(torch.from_numpy(sequence.tokens.astype(np.int64))[None].to(device))[0].cpu()
        most = torch.finfo(torch.float16).max
        return replace(sequence, states=states.clamp(-most, most).half().numpy())


def open_model(
    recipe: AnyRecipe, target: TrainingTarget, manifest: DataManifest, vocabulary: ChosenVocabulary, device: str
) -> OpenedModel:
    """An untrained model of a recipe.

    Raises:
        ConfigurationError: the target is not the one that made the data, its output layer has a form that cannot be trained
            against, or the recipe fits neither it nor the data.
    """
    digest = weights_digest(target.folder)
    if digest != manifest.target.weights_sha256:
        raise ConfigurationError(
            f"the target at {target.folder} has the hash {digest[:12]}, but the data are from {manifest.target.name} "
            f"({manifest.target.weights_sha256[:12]}): name that model with --model",
            about=target.folder,
        )
    shape = read_target_shape(target.folder)
    columns = columns_of(recipe, shape)
    check_layers("the data", manifest.layers, columns.layers)
    rows = read_target_rows(target.folder, device=device, whole=True)
    ids = torch.from_numpy(vocabulary.ids).to(device)
    output = output_of(rows)
    # The model's first values do not depend on the device.
    torch.manual_seed(recipe.seed)
    learner: Learner
    inside = None
    if isinstance(recipe, HeadRecipe | Eagle3Recipe):
        head = (
            new_head(recipe, shape, rows, ids, target.folder)
            if isinstance(recipe, HeadRecipe)
            else new_eagle3_head(recipe, shape, rows, ids, columns.inputs)
        )
        _check_top(recipe, len(ids))
        learner = HeadLearner(head.to(device), output, ids, recipe, columns)
    elif isinstance(recipe, BlockRecipe):
        drafter = new_block_drafter(recipe, shape, rows, ids, columns.inputs, manifest.target.eos_token_ids)
        learner = BlockLearner(drafter.to(device), output, ids, recipe, columns)
    elif isinstance(recipe, LayersRecipe):
        learner = LayersLearner(new_draft_model(recipe, target.floats()).to(device), output, ids, recipe)
    else:
        guessing = _guessing(recipe, shape, SharedOutput(rows, ids), target)
        guessing.module.to(device)
        learner = LevelsLearner(guessing, output, ids, recipe, columns)
        inside = guessing.inside if isinstance(guessing, GuessingStreams) else None
    return OpenedModel(
        recipe=recipe,
        learner=learner,
        output=output,
        columns=columns,
        inside=inside,
        manifest=manifest,
        vocabulary=vocabulary,
    )


def _check_top(recipe: UnrolledRecipe, tokens: int) -> None:
    if recipe.top_k_weight and recipe.top_k > tokens:
        raise ConfigurationError(
            field="the recipe's top_k", value=recipe.top_k, allowed=f"at most {tokens}, the size of the draft vocabulary"
        )


def check_same_target(folder: Path, data: DataManifest, run: DataManifest) -> None:
    """Whether the data in ``folder`` are from the target of a run.

    Raises:
        ConfigurationError: they are not.
    """
    if data.target.weights_sha256 != run.target.weights_sha256:
        raise ConfigurationError(
            f"made by {data.target.name} ({data.target.weights_sha256[:12]})",
            field="--data",
            verb="",
            value=folder,
            allowed=f"of the run's target, {run.target.name} ({run.target.weights_sha256[:12]})",
        )


def _guessing(
    recipe: StreamsRecipe | MedusaRecipe, shape: TargetShape, output: SharedOutput, target: TrainingTarget
) -> Guessing:
    if isinstance(recipe, MedusaRecipe):
        return GuessingHeads(recipe, shape, output)
    return GuessingStreams(recipe, shape, output, target.folder, target.floats)


def output_of(rows: TargetRows) -> torch.Tensor:
    """[V, h], float32: all output rows of a target whose logits are their products with its state.

    Raises:
        ConfigurationError: its output layer does more.
    """
    if rows.bias is not None or rows.softcap is not None:
        what = "a bias" if rows.bias is not None else "final_logit_softcapping"
        raise ConfigurationError(
            f"the target's output layer has {what}: training knows output layers without it only",
            about="the target's output layer",
        )
    return rows.output.all().float() * rows.scale


def fresh_state(opened: OpenedModel, start: StartRecord | None = None) -> RunState:
    """The state of a run that begins, of an untrained model or with the weights of ``start``."""
    manifest = opened.manifest
    return RunState(
        recipe=opened.recipe.model_dump(mode="json"),
        data=hashlib.sha256(manifest.origin.encode()).hexdigest(),
        target=manifest.target.weights_sha256,
        vocabulary=hashlib.sha256(opened.vocabulary.ids.tobytes()).hexdigest(),
        layers=opened.columns.layers,
        start=start,
    )


def reopen(
    run: Path, snapshot: RunState, tensors: dict[str, torch.Tensor], target: TrainingTarget, device: str
) -> OpenedModel:
    """The model of a checkpoint.

    Args:
        run: folder of its run, with the data's manifest and the draft vocabulary.

    Raises:
        ConfigurationError: it does not fit the target, or the run's folder lacks something.
    """
    manifest = read_data_manifest(run)
    recipe = parse_recipe(snapshot.recipe, f"{run}: the recipe")
    opened = open_model(recipe, target, manifest, read_vocabulary(run, manifest), device)
    if fresh_state(opened).vocabulary != snapshot.vocabulary:
        raise ConfigurationError(f"{run} holds another draft vocabulary than its checkpoint was trained with", about=run)
    with torch.no_grad():
        parameters = dict(opened.learner.module.named_parameters())
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return opened
