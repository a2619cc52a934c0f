"""A draft model's proposals for the next token: those that the target is likeliest to choose, or one drawn from q.

q is the draft model's distribution as the request's sampling parameters make it: softmax(logits / T) after top-k, top-p and
min-p. With the request's own noise g, the target chooses the argmax of log p + g. So drafts are the greatest log q + g: the
same token as the target's wherever q is near p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.drafter.sessions.drawn_proposals import Draw, drawn_from
from speculation.messages import DraftNoise
from speculation.philox import NoiseStream, gumbel
from speculation.types import Proposal

# Tokens less likely than e^-12 of the likeliest one are left out. Noise would have to favour them by more than that.
_REACH = 12.0


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Candidates after one row.

    Attributes:
        ids: [n], the target's ids, likeliest first.
        probabilities: [n], that the target takes them: q, or with noise softmax(logits + T g), the chances of each to be the
            target's argmax if the target's logits differ from the draft model's by Gumbel errors of scale 1.
        entropy: of this distribution, nats.
    """

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    entropy: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a session's tokens are chosen.

    Attributes:
        targets: [kept ids], the target's id of each logit; None: they are the same.
    """

    temperature: float
    noise: DraftNoise | None = None
    targets: NDArray[np.int64] | None = None

    def likeliest(self, logits: NDArray[np.float32], position: int) -> NextTokens:
        """The candidates for the token at ``position``, counted from the start of the prompt, from [kept ids]."""
        noise = self.noise
        ids, q = self.spread(logits, self.temperature or 1.0)
        if noise is None or self.temperature == 0:
            return NextTokens(ids, q, _entropy(q))
        ids, q = _truncated(ids, q, noise)
        perturbed = self.temperature * (np.log(q) + gumbel(noise.seed, NoiseStream.CHOICE, position, ids))
        order = np.argsort(-perturbed, kind="stable")
        ids, perturbed = ids[order], perturbed[order]
        chances = np.exp(perturbed - perturbed[0])
        chances /= chances.sum()
        return NextTokens(ids, chances, _entropy(chances))

    def drawn(self, logits: NDArray[np.float32], draw: Draw) -> tuple[int, float, Proposal]:
        """A token drawn from q, its probability, and q itself: cut first to what a proposal can hold, then drawn from."""
        ids, q = self.spread(logits, self.temperature)
        index, proposal = drawn_from(ids, q, draw)
        return proposal.token_ids[index], proposal.probabilities[index], proposal

    def spread(self, logits: NDArray[np.float32], temperature: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Ids and probabilities of softmax(logits / T), likeliest first, without the least likely."""
        top = logits.max()
        shares = np.exp((logits - top) / np.float32(temperature))
        near = np.flatnonzero(logits >= top - np.float32(_REACH * temperature))
        own = shares[near].astype(np.float64) / float(shares.sum())
        order = np.argsort(-own, kind="stable")
        ids = near[order]
        return ids if self.targets is None else self.targets[ids], own[order]


def _truncated(
    ids: NDArray[np.int64], q: NDArray[np.float64], noise: DraftNoise
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What top-k, top-p and min-p leave, in transformers' order; ``q`` descends."""
    count = len(q)
    if noise.top_k:
        count = min(count, noise.top_k)
        q = q / q[:count].sum()
    if noise.top_p < 1:
        count = min(count, int(np.searchsorted(np.cumsum(q[:count]), noise.top_p)) + 1)
    if noise.min_p:
        count = min(count, int(np.count_nonzero(q >= noise.min_p * q[0])))
    return ids[:count], q[:count]


def _entropy(q: NDArray[np.float64]) -> float:
    known = q[q > 0]
    return float(-(known * np.log(known)).sum())
