"""The target's own next token: the one function that every token of every answer comes from.

Temperature 0 takes the argmax. Otherwise the Gumbel-max trick turns sampling into an argmax as well: the noise is a pure
function of (seed, position, token id), so the same prefix, parameters and seed give the same token wherever, whenever and
in whatever tree the position is computed (reference: Maddison, Tarlow, Minka, "A* sampling", 2014, section 2).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from speculation.errors import Internal
from speculation.philox import NoiseStream, gumbel
from speculation.types import SamplingParams, TokenLogprobs


def choose(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The target's token for ``position``.

    Args:
        logits: [vocabulary], float32, after all processors of the request; -inf where a token cannot be chosen.
        seed: the request's seed, 64 bits.
        position: index of the token that is chosen, counted from the start of the prompt.

    Raises:
        Internal: no token can be chosen (NaN, or everything masked).
    """
    if params.temperature == 0:
        # Ten times as fast as torch's argmax; both take the first of equal logits.
        values = logits.numpy()
        best = int(values.argmax())
        _check_finite(float(values[best]))
        return best
    return sample(logits.double().numpy(), seed, NoiseStream.CHOICE, position)


def sample(log_weights: NDArray[np.float64], seed: int, stream: NoiseStream, position: int) -> int:
    """Draw an index with probability proportional to exp(``log_weights``).

    Args:
        log_weights: [n], -inf for impossible indices.

    Raises:
        Internal: no index is possible.
    """
    possible = np.flatnonzero(log_weights > -np.inf)
    if not len(possible) or np.isnan(log_weights).any():
        _check_finite(float("nan"))
    noisy = log_weights[possible] + gumbel(seed, stream, position, possible)
    return int(possible[np.argmax(noisy)])


def log_probabilities(logits: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities (nats) of ``token`` and of the ``top`` likeliest ones.

    Args:
        logits: [vocabulary], unprocessed.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = ranked(logprobs, top)
    return TokenLogprobs(
        token_id=token,
        logprob=float(logprobs[token]),
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(values.tolist()),
    )


def ranked(logprobs: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top`` greatest of each row and their ids, [..., top]; of equal ones the least id comes first, as in choices.

    ``torch.topk`` leaves their order open, and in bfloat16 many logits are equal.

    Args:
        logprobs: [..., vocabulary], float32.
    """
    bits = logprobs.contiguous().view(torch.int32)
    # Integers in the order of the numbers: of negative ones all bits behind the sign are flipped. -0.0 is below 0.0.
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    found = torch.topk((rank << 32) - ids, top).indices
    return logprobs.gather(-1, found), found


def _check_finite(value: float) -> None:
    if value != value or value in (float("inf"), float("-inf")):
        raise Internal("the model gave no usable logits for a position (NaN, or every token masked)")
