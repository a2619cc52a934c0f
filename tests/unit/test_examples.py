"""The worked examples in docstrings do what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from services.drafter.sources import prompt_lookup, suffix
from services.verifier.loading import memory, part_sizes
from services.verifier.recurrence import room
from speculation import acceptance, budget, tree

MODULES = [tree, acceptance, budget, prompt_lookup, suffix, memory, part_sizes, room]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_do_what_they_say(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0, f"{module.__name__} has no example"
    assert result.failed == 0, "the output above says which"
