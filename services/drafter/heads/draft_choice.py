"""The proposals of a drafter of hidden states after each row: all work on arrays as long as the draft vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.choosing_session import ChoosingSession
from services.drafter.heads.draft_vocabulary import DraftVocabulary
from speculation.messages import DraftNoise

# A nucleus of more tokens than this is not cut off: finding its end would cost more than it helps a drafter.
_NUCLEUS = 256


class StateDrafter(Protocol):
    """A model that drafts from the target's states."""

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that it drafts for every request."""
        ...

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h], what the output layer reads, to [..., V_d]."""
        ...


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Rows of one session after which candidates are wanted.

    Attributes:
        positions: [rows], of the tokens that would come next, counted from the start of the prompt.
    """

    session: ChoosingSession
    positions: NDArray[np.int64]


class DraftChoice:
    """Finds the likeliest tokens by the draft distribution q = softmax(logits / temperature), truncated as the target's own.

    At temperature 0 that is the top k of softmax(logits). At others, where the noise g of the target's choices is known, it
    is the top k of log q + g: the target takes the greatest log p + g, so its own choice comes first wherever q is near p.
    Their probabilities are then softmax(logits + temperature * g): their chances to be the target's choice, if its logits
    differ from the head's by Gumbel errors of scale 1. As the temperature falls to 0, that becomes the rule for temperature
    0.

    """

    def __init__(self, head: StateDrafter) -> None:
        self._head = head
        self._vocabulary = head.vocabulary
        self._ids = self._vocabulary.ids.cpu().numpy()

    def likeliest(
        self, hidden: torch.Tensor, asked: Sequence[AskedRows], count: int, known: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The likeliest tokens after each row.

        Args:
            hidden: [rows, h], what the output layer reads, of the rows ``asked``, one after the other.
            known: [rows, V_d] float32, their logits of the model's own vocabulary, which may change; None: not yet there.

        Returns:
            [rows, count] ids, likeliest first, and their log-probabilities; -inf where a token cannot come.
        """
        return self.of(self.logits(hidden, asked, known), asked, count)

    def of(
        self, logits: torch.Tensor, asked: Sequence[AskedRows], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """As ``likeliest``, from [rows, ...] what ``logits`` gave, which is changed in place."""
        begin = 0
        for each in asked:
            end = begin + len(each.positions)
            if (temperature := each.session.temperature) > 0:
                if (noise := each.session.noise) is not None:
                    truncate(logits[begin:end], temperature, noise)
                    self._add_noise(logits[begin:end], each, temperature)
                else:
                    logits[begin:end] /= temperature
            begin = end
        values, columns = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        logs = (values - torch.logsumexp(logits, dim=-1, keepdim=True)).double().cpu().numpy()
        return self._tokens(columns.cpu().numpy(), asked), logs

    def logits(self, hidden: torch.Tensor, asked: Sequence[AskedRows], known: torch.Tensor | None = None) -> torch.Tensor:
        """As the model says them: [rows, V_d + most extra tokens of a session], float32; -inf where a session has fewer.

        Args:
            known: as for ``likeliest``.
        """
        logits = self._head.logits(hidden, self._vocabulary).float() if known is None else known
        most = max((len(each.session.extra) for each in asked if each.session.extra is not None), default=0)
        if not most:
            return logits
        whole = torch.full(
            (len(hidden), len(self._vocabulary) + most), -torch.inf, dtype=torch.float32, device=logits.device
        )
        whole[:, : len(self._vocabulary)] = logits
        begin = 0
        for each in asked:
            end = begin + len(each.positions)
            if (extra := each.session.extra) is not None:
                own = whole[begin:end, len(self._vocabulary) : len(self._vocabulary) + len(extra)]
                own[:] = self._head.logits(hidden[begin:end], extra)
            begin = end
        return whole

    def _add_noise(self, logits: torch.Tensor, asked: AskedRows, temperature: float) -> None:
        own, extra = logits, asked.session.extra
        ids = self._ids
        if extra is not None:
            ids = np.concatenate((ids, extra.ids.cpu().numpy()))
            own = logits[:, : len(ids)]
        # Nodes of one depth have one position, and so the same noise.
        for position in set(asked.positions.tolist()):
            rows = torch.from_numpy(np.flatnonzero(asked.positions == position))
            own[rows] += temperature * asked.session.gumbel(position, ids, logits.device)

    def _tokens(self, columns: NDArray[np.int64], asked: Sequence[AskedRows]) -> NDArray[np.int64]:
        """The tokens in these columns of ``_logits``."""
        size = len(self._ids)
        tokens = self._ids[np.minimum(columns, size - 1)]
        if columns.max(initial=0) < size:
            return tokens
        begin = 0
        for each in asked:
            end = begin + len(each.positions)
            if (extra := each.session.extra) is not None:
                own = columns[begin:end]
                # Columns behind a session's own tokens are impossible ones.
                tokens[begin:end][own >= size] = extra.ids.cpu().numpy()[np.minimum(own[own >= size] - size, len(extra) - 1)]
            begin = end
        return tokens


def truncate(logits: torch.Tensor, temperature: float, noise: DraftNoise) -> None:
    """Set to -inf what top-k, top-p and min-p exclude of [rows, n] at a temperature, in place, in transformers' order.

    A nucleus of more than ``_NUCLEUS`` tokens stays whole.
    """
    if 0 < noise.top_k < logits.shape[1]:
        least = torch.topk(logits, noise.top_k, dim=-1).values[:, -1:]
        logits.masked_fill_(logits < least, -torch.inf)
    if noise.top_p < 1:
        scaled = logits / temperature
        best = torch.topk(scaled, min(_NUCLEUS, logits.shape[1]), dim=-1).values
        shares = (best - torch.logsumexp(scaled, dim=-1, keepdim=True)).exp()
        # A token belongs to the nucleus if those before it do not reach top_p.
        inside = (shares.cumsum(-1) - shares < noise.top_p).sum(-1, keepdim=True)
        least = torch.where(inside < best.shape[1], best.gather(1, inside - 1), -torch.inf)
        logits.masked_fill_(scaled < least, -torch.inf)
    if noise.min_p > 0:
        least = logits.amax(-1, keepdim=True) + temperature * math.log(noise.min_p)
        logits.masked_fill_(logits < least, -torch.inf)
