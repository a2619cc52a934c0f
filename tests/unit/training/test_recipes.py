"""Recipes: every built-in one is valid, and every mistake in a file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from training.recipe import HeadRecipe, LayersRecipe, load_recipe, names


def test_the_built_in_recipes() -> None:
    assert set(names()) >= {
        "draft_model", "eagle", "eagle_matched", "fspad", "fspad_alignment_only", "fspad_paper", "fspad_sampler_only", "medusa", "streams",
    }  # fmt: skip
    loaded = {name: load_recipe(name) for name in names()}
    halves = {
        name: (recipe.sampler, recipe.partial_alignment) for name, recipe in loaded.items() if isinstance(recipe, HeadRecipe)
    }
    assert halves["fspad"] == halves["fspad_paper"] == (True, True)
    assert halves["eagle"] == halves["eagle_matched"] == (False, False)
    assert halves["fspad_sampler_only"] == (True, False)
    assert halves["fspad_alignment_only"] == (False, True)
    assert isinstance(loaded["draft_model"], LayersRecipe)
    # An ablation changes one thing at a time.
    ablation = [loaded[name] for name in ("eagle", "fspad", "fspad_sampler_only", "fspad_alignment_only")]
    assert len({recipe.model_copy(update={"sampler": True, "partial_alignment": True}).digest() for recipe in ablation}) == 1


def _file(folder: Path, text: str) -> str:
    file = folder / "own.yaml"
    file.write_text(text)
    return str(file)


def test_values_can_be_replaced(tmp_path: Path) -> None:
    file = _file(tmp_path, "kind: draft_model\nlayers: [0, 29]\n")
    assert load_recipe(file, steps=7) == LayersRecipe(kind="draft_model", layers=(0, 29), steps=7)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "kind: head\nsampler: true\npartial_alignment: true\nlearnig_rate: 1\n",
            ("learnig_rate", None, "did you mean learning_rate?"),
        ),
        ("kind: head\nsampler: true\n", ("partial_alignment", "missing")),
        ("kind: hydra\n", ("kind", "hydra")),
        ("kind: streams\nheads: 3\n", ("heads",)),
        ("steps: 3\n", ("kind", "missing")),
        ("kind: draft_model\nlayers: [1, 1]\n", (None, None, "distinct")),
        ("kind: draft_model\nsampler: true\n", ("sampler",)),
        (
            "kind: draft_model\nlayers: [0, 1]\nfrozen_layers: 2\n",
            (None, None, "frozen_layers is 2: must be below the number of layers, 2"),
        ),
        ("kind: draft_model\nmuon_rate: 0\n", ("muon_rate", 0)),
        ("kind: draft_model\nlearning_rate: -1\n", ("learning_rate", -1)),
        ("kind: draft_model\ndivergence: mse\n", ("divergence", "'mse'")),
        ("- 1\n", ("own.yaml", None, "must hold keys and values")),
        ("a: [\n", ("own.yaml", None, "no YAML")),
    ],
)
def test_mistakes_are_named(text: str, refusal: tuple[object, ...], tmp_path: Path) -> None:
    with refuses(ConfigurationError, *refusal) as caught:
        load_recipe(_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with refuses(ConfigurationError, field="recipe", value="fspda"):
        load_recipe("fspda")
