"""Where all requests take the likeliest token, walks down a device's trees find what the law finds row by row."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.model.target_port import NOT_CHOSEN, Rows
from services.verifier.model.tree_rows import TreeOutcomes
from tests.engine.choices import ELSEWHERE

VOCABULARY = 8


def a_batch(draw: Random) -> list[Rows]:
    batch = []
    for number in range(draw.randrange(1, 6)):
        nodes, chain = draw.choice((0, 0, 1, 4, 9)), draw.choice((1, 1, 3))
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(chain + nodes))
        parents = tuple(draw.randrange(-1, node) for node in range(nodes))
        logits = 0 if not nodes and draw.randrange(4) == 0 else 1 + nodes
        batch.append(Rows(request_id=f"r{number}", context=5, tokens=tokens, parents=parents, logits=logits))
    return batch


def chooser_for(batch: list[Rows], reader: LogitsReader = READER) -> Chooser:
    chooser = Chooser(reader=reader)
    for rows in batch:
        chooser.open(rows.request_id, None)
    return chooser


@pytest.mark.parametrize("seed", range(40))
def test_the_choices_are_those_of_the_law(seed: int) -> None:
    draw = Random(seed)
    batch = a_batch(draw)
    ids = [draw.randrange(VOCABULARY) for _ in range(sum(rows.logits for rows in batch))]
    logits = torch.nn.functional.one_hot(torch.tensor(ids, dtype=torch.int64), VOCABULARY).float()
    found = chooser_for(batch).outcomes(batch, logits.to("meta"), lambda: ids)
    assert isinstance(found, TreeOutcomes)
    whole = chooser_for(batch).outcomes(batch, logits)
    assert [*found] == whole
    for begin in range(len(batch) + 1):
        for end in range(len(batch) + 2):
            assert [*found[begin:end]] == whole[begin:end]
    assert [found[at] for at in range(-len(batch), len(batch))] == [*whole, *whole]


@pytest.mark.parametrize("seed", range(20))
def test_likely_ids_are_those_of_the_long_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(seed)
    batch = [replace(rows, top_k=draw.choice((0, 2, 2, 3))) for rows in a_batch(draw)]
    logits = torch.rand(sum(rows.logits for rows in batch), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(Chooser, "_plain_outcomes", lambda *given: None)
        ids = logits.argmax(dim=1).tolist()
        found.append([*chooser_for(batch, ELSEWHERE).outcomes(batch, logits, partial(list, ids))])
    assert found[0] == found[1]
    assert all(len(made.top_ids) == (rows.logits if rows.top_k else 0) for rows, made in zip(batch, found[0], strict=True))


@pytest.mark.exhaustive
def test_a_row_that_the_device_does_not_know_is_asked_of_the_law() -> None:
    # Nothing is chosen after the node, and nobody asks: the walk does not reach it.
    batch = [Rows(request_id="r", context=5, tokens=(1, 2), parents=(-1,), logits=2)]
    (found,) = chooser_for(batch).outcomes(batch, torch.empty(2, VOCABULARY, device="meta"), lambda: [3, NOT_CHOSEN])
    assert found.choices == (3, NOT_CHOSEN)
    assert found.error is None
    (failed,) = chooser_for(batch).outcomes(batch, torch.empty(2, VOCABULARY, device="meta"), lambda: [NOT_CHOSEN, 3])
    assert failed.error is not None
