"""Recipes: everything that decides what a training run computes, as one YAML file with strict keys.

Two runs of one recipe on the same data end in the same bits; how long a run may take, where it computes and where it writes
is not part of a recipe. Sources: EAGLE (arXiv 2401.15077), FSPAD (2408.15562), EAGLE-3's unrolled training (2503.01840),
HASS (2408.15766), LK losses (2602.23881), DFlash (2602.06036), DSpark (2607.05147), Medusa (2401.10774), Speculative
Streaming (2402.11131), Muon as in Moonlight (2502.16982).
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import override

from services.model_files.folder import reading
from services.wrong_values import allowed, did_you_mean
from services.yaml_text import read_yaml
from speculation import limits
from speculation.errors import ConfigurationError, quoted

Share = Annotated[float, Field(ge=0, le=1)]
Divergence = Literal["hard_ce", "soft_ce", "kl", "tv", "lk", "ce_tv"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeBase(_Strict):
    """What all recipes have."""

    divergence: Divergence = Field("lk", description="between the target's and the drafter's next-token distributions")
    counted: Literal["text", "likeliest"] = Field(
        "text",
        description="a prediction counts if the draft vocabulary has the token of the text, or the target's likeliest one",
    )
    steps: int = Field(2000, ge=1, description="optimiser steps, over which the learning rate falls to 0")
    batch_rows: int = Field(4096, ge=1, description="positions of each step; the last sequence is not cut")
    micro_rows: int = Field(2048, ge=1, description="positions that are computed at a time")
    max_rows: int = Field(2048, ge=8, description="longer sequences lose their beginning")
    learning_rate: float = Field(1e-3, gt=0)
    muon_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of Muon, which then trains matrices without a row for each token; null: AdamW trains all",
    )
    scaled_rates: bool = Field(
        False,
        description="AdamW's rate of a tensor is times its root mean square, at least 0.1: large ones move as fast as small",
    )
    warmup: Share = Field(0.03, description="share of the steps in which the learning rate rises")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the gradient")
    clip_value: float | None = Field(None, gt=0, description="largest single value of the gradient")
    precision: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of the matrix products; parameters and distributions are float32"
    )
    evaluate_every: int = Field(
        200, ge=1, description="steps between two looks at the validation split, which choose the best"
    )
    seed: int = Field(1, ge=0)

    def digest(self) -> str:
        """SHA-256 of all values."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


class UnrolledRecipe(RecipeBase):
    """What recipes of heads have that feed their own states back."""

    unroll_steps: int = Field(3, ge=1, le=8, description="steps on the drafter's own states, the first one included")
    unroll_from: Share = Field(0.67, description="share of the steps after which it is unrolled; 1: never")
    unroll_decay: float = Field(0.8, gt=0, le=1, description="weight of each further unrolled step")
    detach: bool = Field(True, description="no gradient through the states fed back, as in HASS")
    noise: float = Field(0.2, ge=0, description="width of uniform noise on input states, times 512 / rows of the sequence")
    missing_rows: Share = Field(
        0.15, description="share of input states that are replaced by the learnt one for missing states"
    )
    answer_only: Share = Field(0.3, description="share of sequences whose prompt is left out")
    divergence_weight: float = Field(1.0, ge=0)
    top_k: int = Field(10, ge=1, description="of the target's likeliest tokens, those of HASS's top-k loss")
    top_k_weight: float = Field(0.0, ge=0, description="of HASS's top-k loss, which is added; 0: none. HASS takes 1")

    @property
    def state_loss(self) -> float:
        """Weight of a loss on the states fed back, as long as nothing is unrolled."""
        return 0.0


class HeadRecipe(UnrolledRecipe):
    """A head that drafts from the target's states: EAGLE, FSPAD, or either half of FSPAD."""

    kind: Literal["head"]
    sampler: bool = Field(description="FSPAD's feature sampler in front of the layer")
    partial_alignment: bool = Field(description="FSPAD's second output, which alone is fed back and compared with states")
    intermediate_size: int | None = Field(None, ge=1, description="inner width of the layer's MLP; null: the target's")
    layer: Literal["random", "last"] = Field(
        "random", description="what the layer starts from: noise, or the target's last one"
    )
    regression_weight: float = Field(
        1.0, ge=0, description="of SmoothL1 between the state fed back and the target's, as long as nothing is unrolled"
    )

    @property
    @override
    def state_loss(self) -> float:
        return self.regression_weight


class Eagle3Recipe(UnrolledRecipe):
    """EAGLE-3's head: it reads states of several layers, and has an output layer of its own over the draft vocabulary."""

    kind: Literal["eagle3"]
    state_layers: tuple[int, ...] | None = Field(
        None, min_length=1, max_length=limits.MAX_LAYERS, description="whose states it reads; null: the paper's three"
    )
    intermediate_size: int | None = Field(None, ge=1, description="inner width of the layer's MLP; null: the target's")
    unroll_steps: int = Field(7, ge=1, le=8, description="steps on the drafter's own states, the first one included")
    unroll_from: Share = Field(0.0, description="share of the steps after which it is unrolled; 1: never")
    detach: bool = Field(False, description="no gradient through the states fed back")


class LayersRecipe(RecipeBase):
    """A draft model made of some of the target's layers. Its embeddings and output layer stay the target's."""

    kind: Literal["draft_model"]
    layers: tuple[int, ...] = Field(
        (0, 1, 2, 3), min_length=1, description="the target's layers that it starts from, in order"
    )
    frozen_layers: int = Field(0, ge=0, description="how many of them, from the first on, stay as they are")
    prompt_rows: bool = Field(False, description="positions of prompts count as well")
    state_weight: float = Field(
        0.0, ge=0, description="of |x - s|^2 / |s|^2, where the output layer reads x, and s of the target"
    )

    @model_validator(mode="after")
    def _possible(self) -> LayersRecipe:
        if len(set(self.layers)) != len(self.layers):
            raise ValueError("layers must be distinct")
        if self.frozen_layers >= len(self.layers):
            raise ValueError(
                f"frozen_layers is {self.frozen_layers}: must be below the number of layers, {len(self.layers)}"
            )
        return self


class LevelsRecipe(RecipeBase):
    """What recipes of models have that guess several tokens ahead at once."""

    level_decay: float = Field(1.0, gt=0, le=1, description="weight of each further token ahead")
    anchors: float = Field(1.0, gt=0, le=1, description="share of an answer's positions that a step guesses from")

    @property
    def text_loss(self) -> float:
        """Weight of a loss on the target's own guess of the next token, against the text; 0: it stays as it is."""
        return 0.0


class StreamsRecipe(LevelsRecipe):
    """Speculative streams through the target's last layers, which stay as they are."""

    kind: Literal["streams"]
    streams: int = Field(4, ge=1, le=16, description="tokens ahead")
    stream_layers: int = Field(6, ge=1, description="the target's last layers that they run through")
    rank: int = Field(16, ge=1, description="of the adapters on q, v, o and down")
    kept_states: bool = Field(
        False, description="read the states that streams begin with from the data, in place of the layers below"
    )
    fitted: int = Field(
        0,
        ge=0,
        description="positions on which least squares gives the adapters before the first step, and whose states the "
        "embeddings are as large as; 0: streams begin as the target's own rows, a little apart",
    )
    pruning_rank: int = Field(
        0, ge=0, le=64, description="of the adapter of an early exit that prunes trees, trained beside the streams; 0: none"
    )
    pruning_alone: bool = Field(
        False, description="train the early exit and leave the streams as they are, those of --start-from"
    )
    main_weight: float = Field(
        0.0,
        ge=0,
        description="of the target's own cross-entropy on the text, over that of a stream: above 0 the adapters act on its "
        "rows, too, as in the paper, which takes 10. That changes what it says, so such streams are for the paper's table "
        "alone, and every verifier refuses them; 0: the target stays as it is",
    )
    anchors: float = Field(0.125, gt=0, le=1, description="share of an answer's positions that a step guesses from")

    @property
    @override
    def text_loss(self) -> float:
        return self.main_weight

    @model_validator(mode="after")
    def _possible(self) -> StreamsRecipe:
        if self.pruning_alone and not self.pruning_rank:
            raise ValueError("pruning_alone is true, but pruning_rank is 0: must be above 0")
        for field in ("pruning_rank", "fitted"):
            if self.main_weight and (value := getattr(self, field)):
                raise ValueError(f"{field} is {value}, but main_weight is {self.main_weight}: must be 0 with it")
        return self


class MedusaRecipe(LevelsRecipe):
    """Medusa's heads over the target's output layer."""

    kind: Literal["medusa"]
    heads: int = Field(4, ge=1, le=16, description="tokens ahead")
    blocks: int = Field(1, ge=1, le=8, description="residual blocks of a head")
    level_decay: float = Field(0.8, gt=0, le=1, description="weight of each further token ahead")


class BlockRecipe(LevelsRecipe):
    """A block drafter: DFlash's layers, and DSpark's heads that know the token before and how sure a row is.

    Without these heads (``markov_rank: 0``) it is DFlash's as its authors have it: each row guesses the token of its own
    position, and the last token's guesses nothing.
    """

    kind: Literal["block"]
    state_layers: tuple[int, ...] | None = Field(
        None, min_length=1, max_length=limits.MAX_LAYERS, description="whose states it reads; null: those of EAGLE-3"
    )
    layers: int = Field(2, ge=1, le=8, description="decoder layers")
    block_size: int = Field(
        8, ge=2, le=limits.MAX_TREE_NODES, description="tokens ahead, the rows of a block: the last token, and masks"
    )
    intermediate_size: int | None = Field(None, ge=1, description="inner width of the layers' MLPs; null: the target's")
    mask_token_id: int | None = Field(
        None, ge=0, description="the token that stands where one is guessed; null: the first that ends a turn"
    )
    causal: bool = Field(True, description="a row sees the rows of its block before it alone")
    markov_rank: int = Field(
        64,
        ge=0,
        description="of the matrix by which the token before changes a row's logits; 0: a plain DFlash, without it, without "
        "a head that says how sure a row is, and with one token ahead less",
    )
    markov_head: Literal["vanilla", "gated"] = Field(
        "vanilla", description="gated: the row weighs what the token before says"
    )
    confidence_weight: float = Field(
        1.0, ge=0, description="of the loss of the head that says how likely a row's draft is accepted"
    )
    divergence: Divergence = Field("ce_tv", description="between the target's and the drafter's next-token distributions")
    anchors: float = Field(0.25, gt=0, le=1, description="share of an answer's positions that a step guesses from")
    level_decay: float = Field(0.8, gt=0, le=1, description="weight of each further token ahead")

    @model_validator(mode="after")
    def _of_the_heads(self) -> BlockRecipe:
        if not self.markov_rank and self.markov_head != "vanilla":
            raise ValueError(f"markov_head is {self.markov_head}, but markov_rank is 0: must be above 0")
        return self


AnyRecipe = HeadRecipe | Eagle3Recipe | LayersRecipe | StreamsRecipe | MedusaRecipe | BlockRecipe
_RECIPE: TypeAdapter[AnyRecipe] = TypeAdapter(Annotated[AnyRecipe, Field(discriminator="kind")])
_BY_KIND: dict[str, type[BaseModel]] = {
    kind: each for each in get_args(AnyRecipe) for kind in get_args(each.model_fields["kind"].annotation)
}
_KINDS = "head, eagle3, block, draft_model, streams or medusa"


def names() -> list[str]:
    """Names of the built-in recipes."""
    folder = resources.files("training") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(recipe: str, **changed: Any) -> AnyRecipe:
    """Read a recipe.

    Args:
        recipe: name of a built-in one, or a YAML file.
        changed: values that replace the file's.

    Raises:
        ConfigurationError: no such recipe, or a key or value that is not allowed; names it.
    """
    if recipe in names():
        text = (resources.files("training") / "recipes" / f"{recipe}.yaml").read_text()
    elif Path(recipe).is_file():
        with reading(f"read the recipe {recipe}", about=recipe):
            text = Path(recipe).read_text(encoding="utf-8")
    else:
        known = f"one of {', '.join(names())}{did_you_mean(recipe, names())}"
        raise ConfigurationError(field="recipe", value=recipe, allowed=f"a YAML file, or {known}")
    try:
        content = read_yaml(text)
    except ValueError as error:
        raise ConfigurationError(f"no YAML ({error})", field=recipe) from error
    if not isinstance(content, dict):
        raise ConfigurationError("must hold keys and values", field=recipe)
    return parse_recipe(content | changed, recipe)


def parse_recipe(content: dict[str, Any], name: str) -> AnyRecipe:
    """A recipe from its keys and values.

    Raises:
        ConfigurationError: a key or value is not allowed; names it.
    """
    try:
        return _RECIPE.validate_python(content)
    except ValidationError as error:
        faults = [_fault(dict(each)) for each in error.errors()]
        if len(faults) == 1:
            raise ConfigurationError(**faults[0], place=name) from error
        raise ConfigurationError("; ".join(str(ConfigurationError(**each)) for each in faults), field=name) from error


def _fault(error: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with one key, as the arguments of its refusal."""
    # The first part of a place is the kind of the recipe.
    key = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "extra_forbidden":
        known = _BY_KIND[error["loc"][0]].model_fields
        return {"why": f"unknown key {key}{did_you_mean(key, known)}", "about": key}
    if error["type"] == "missing":
        return {"field": key, "value": "missing"}
    if error["type"] == "union_tag_not_found":
        return {"field": "kind", "value": "missing", "allowed": _KINDS}
    if error["type"] == "union_tag_invalid":
        return {"field": "kind", "value": error["ctx"]["tag"], "allowed": _KINDS}
    why = str(error["msg"]).removeprefix("Value error, ")
    wanted = allowed(error)
    said = {"allowed": wanted} if wanted else {"why": why}
    return {"field": key, "value": quoted(error["input"]), **said} if key else {"why": why}
