"""G7: whether a captured pass gives the bits of the same pass launched, after it was filled with others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu_check.bare_model import BareModel
from benchmarks.gpu_check.packings import bushy_tree, rows_of, tree
from benchmarks.gpu_check.verdicts import GateVerdict, judge_rows
from services.verifier.model.target_port import Rows

Batch = Sequence[Rows]


def captured_passes(
    model: BareModel, length: int = 600, depth: int = 8, others: int = 5, vocabulary: int = 128256
) -> GateVerdict:
    """G7. Each graph is filled with several passes of its bucket, one after the other, the first one again at the end."""
    text = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    for name in ("0", "1"):
        model.logits([rows_of(name, 0, text)])
    wrong: list[str] = []
    compared = 0
    for name, batches in _alike(text, depth, others).items():
        # Written by both ways, what is at these positions is the same.
        expected = [model.logits(batch) for batch in batches]
        # Those behind fewer positions fit, too.
        graph = model.captured(batches[-1])
        for number in (*range(len(batches)), 0):
            graph.fill(batches[number])
            made = graph.replay()[: len(expected[number])]
            compared += len(made)
            rows = [
                row
                for row, (one, other) in enumerate(zip(made, expected[number], strict=True))
                if not torch.equal(one, other)
            ]
            wrong += [f"{name}, filling {number}, row {row}" for row in rows]
    return judge_captured(wrong, compared)


def _alike(text: Sequence[int], depth: int, others: int) -> dict[str, list[Batch]]:
    """Passes of one bucket each, at several places of the text."""
    length = len(text)
    starts = (length // 4, length // 2, length - depth - 1)

    def of_tree(start: int, seed: int | None) -> Batch:
        packed = bushy_tree(start, depth, length) if seed is None else tree(start, depth, others, length, seed)
        return [rows_of("0", start, [text[place] for place in packed.shown], packed.parents)]

    return {
        "one row": [[rows_of("0", start, text[start : start + 1])] for start in starts],
        "two requests": [
            [rows_of(name, at, text[at : at + 1]) for name, at in (("0", start), ("1", start - 1))] for start in starts
        ],
        "bushy trees": [of_tree(start, None) for start in starts],
    }


def judge_captured(wrong: Sequence[str], compared: int) -> GateVerdict:
    """The verdict on rows of captured passes that differ from launched ones."""
    return judge_rows(
        wrong,
        compared,
        differ="differ from the launched pass",
        same="of captured passes have the bits of launched ones, whatever filled them before",
        look="look at what a pass leaves behind: fill() of TritonPass, sums of segments",
        follows="passes may be captured",
    )
