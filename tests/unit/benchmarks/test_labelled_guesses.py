"""Which of SPECTRA's guesses are accepted: counted by label, while the verifier sees one source."""

from __future__ import annotations

import asyncio
from typing import cast

from benchmarks.papers.labelled_guesses import LabelledGuesses
from services.drafter.config import DrafterConfig, SpectraConfig
from services.drafter.service import DrafterService
from services.drafter.sources.spectra import BACKWARD, CORE, FORWARD, LABELS, SUB_NGRAM
from speculation.messages import Draft, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import Observation, TokenTree
from tests.drafters.drafter_sessions import opening

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3)


def test_guesses_are_counted_by_where_they_come_from() -> None:
    asyncio.run(_count())


async def _count() -> None:
    config = DrafterConfig(spectra=SpectraConfig(ngram=3, window=0, label_guesses=True))
    guesses = LabelledGuesses(DrafterService(config), CORE)
    draft = cast(Draft, await guesses.open(opening("a", (CORE,), PROMPT)))
    # After 2, 3 came 4 and then 5, backward; forward, 3 was followed by 4, 5.
    assert draft.tree.tokens == (4, 5) and set(draft.tree.sources) == {CORE}
    await guesses.step(_report(draft.tree, committed=(4, 9), accepted=1))
    assert guesses.drafted == {BACKWARD: 2} and guesses.accepted == {BACKWARD: 1}
    await guesses._drafter.stop()


def _report(tree: TokenTree, committed: tuple[int, ...], accepted: int) -> StepReport:
    return StepReport(
        session_id="a",
        committed=committed,
        length=len(PROMPT) + len(committed),
        prefix_hash=extend_hash(extend_hash(EMPTY_HASH, PROMPT), committed),
        accepted_path=tuple(range(accepted)),
        max_nodes=8,
        observation=Observation(tree=tree),
    )


def test_labels_are_of_different_dictionaries() -> None:
    assert {FORWARD, SUB_NGRAM, BACKWARD} < set(LABELS) and len(set(LABELS)) == 5
