"""Sizes of parts that count otherwise than the rest: a pass reads, or a rank holds, another share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The experts of all layers whose rows choose as many of as many, without routers and experts that get every row.

    Attributes:
        parameters: of all of them.
        experts: of a layer.
        chosen: of a layer, by a row.
    """

    parameters: int
    experts: int
    chosen: int

    def read(self, rows: int) -> float:
        """Parameters that a pass over so many rows reads in expectation, as if each row drew its experts evenly.

        A row leaves an expert out with a probability of 1 - chosen / experts, so ``rows`` of them leave it out with that
        to the power of ``rows``. One row of Qwen3-30B-A3B reads 8 experts of 128 in each layer, and 64 rows read 125.9:

        >>> layer = Mixture(parameters=128, experts=128, chosen=8)
        >>> [round(layer.read(rows), 1) for rows in (1, 4, 64)]
        [8.0, 29.1, 125.9]
        """
        return self.parameters * (1 - (1 - self.chosen / self.experts) ** rows)

    @property
    def of_a_row(self) -> float:
        """Parameters by which a row is multiplied."""
        return self.parameters * self.chosen / self.experts


class Uncut(NamedTuple):
    """Parameters that are not shared out evenly among the ranks of a stage (``cut_layers``).

    Attributes:
        per_layer: of a layer, those that every rank holds: routers, norms, and what latent attention has before its heads.
        keys: of a layer, those that make keys and values: ranks beyond the number of key heads hold the same ones.
        others: outside of layers, those that every rank holds.
    """

    per_layer: int = 0
    keys: int = 0
    others: int = 0

    def held(self, per_layer: int, ranks: int, kv_heads: int) -> int:
        """Of a layer's parameters those that one rank holds.

        Four ranks of a layer of 100 parameters, of which 8 are whole and 12 make the keys of two heads:

        >>> Uncut(per_layer=8, keys=12).held(100, ranks=4, kv_heads=2)
        34
        """
        cut = per_layer - self.per_layer - self.keys
        return cut // ranks + self.keys // min(ranks, kv_heads or ranks) + self.per_layer


class Exchanged(NamedTuple):
    """What the ranks of a stage exchange in a pass through all layers.

    Attributes:
        times: how often.
        numbers: of a row, in all of them together: each rank gives its part.
        repeated: of a row, those that every rank gives.
    """

    times: int = 0
    numbers: int = 0
    repeated: int = 0

    def seconds(self, rows: int, ranks: int, *, each_s: float, link: float) -> float:
        """What they take, in bfloat16.

        Args:
            each_s: of a gather of few bytes.
            link: bytes per second that a rank gets.

        A layer of Qwen3-30B-A3B gathers what its heads make, 4096 numbers, 2048 behind them, 8 experts' 768 and 2048 again:

        >>> layer = Exchanged(times=4, numbers=4096 + 2048 + 8 * 768 + 2048)
        >>> [f"{1e6 * layer.seconds(rows, 8, each_s=5e-6, link=3.7e11):.1f} us" for rows in (1, 64)]
        ['20.1 us', '25.0 us']
        """
        return self.times * each_s + 2 * (self.numbers + ranks * self.repeated) * rows / link


class SteppedRows(NamedTuple):
    """What layers with a state hold of a pass's rows besides the states of requests, all in float32.

    Attributes:
        noted: numbers that a row is given in all of these layers.
        put_aside: of the largest state that is put aside where a tree branches.
    """

    noted: int = 0
    put_aside: int = 0
