"""Short causal convolutions of each channel: a row's output, and the inputs that the states hold after a pass.

Rows are computed side by side, since each needs inputs alone. They are found from link to link (``recurrence.walks``).
"""

import triton
import triton.language as tl

from services.verifier.recurrence.walks import END_INTS, LINK_INTS, REQUEST_INTS

_REQUEST, _LINK, _END = tl.constexpr(REQUEST_INTS), tl.constexpr(LINK_INTS), tl.constexpr(END_INTS)


@triton.jit
def _before(at, links):
    """What comes before ``at``: a row; or, below 0, an input of the state, of which -1 is the newest."""
    row = tl.load(links + tl.maximum(at, 0) * _LINK)
    return tl.where(at >= 0, row, at - 1)


@triton.jit
def _input(at, given, state, row_stride, channel, channels, BEFORE: tl.constexpr):
    """The input at a row or, below 0, in a state of BEFORE inputs."""
    # No channel of the one that is not read.
    of_rows = tl.load(
        given + tl.maximum(at, 0).to(tl.int64) * row_stride + channel,
        mask=channel < tl.where(at >= 0, channels, 0),
        other=0.0,
    )
    of_state = tl.load(state + (BEFORE + at) * channels + channel, mask=channel < tl.where(at >= 0, 0, channels), other=0.0)
    return tl.where(at >= 0, of_rows, of_state)


@triton.jit(do_not_specialize=["row_stride", "channels", "accepted", "links_at"])
def convolve(
    given, weight, bias, states, made, walk, row_stride, channels, accepted, links_at,
    BEFORE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one row: its BEFORE inputs before, the oldest first, then its own, each product rounded.

    Args:
        given: [rows, channels], one row every ``row_stride`` numbers, ``accepted`` of them first.
        weight: [channels, BEFORE + 1]. bias: [channels]; read if BIAS.
        states: [slots, BEFORE, channels].
        made: [rows - accepted, channels].
        walk: of ``StateWalk``, whose links begin at ``links_at``.
    """
    row = accepted + tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    links = walk + links_at
    state = states + tl.load(links + row * _LINK + 1).to(tl.int64) * BEFORE * channels
    at = row
    inputs = ()
    for _ in tl.static_range(BEFORE):
        at = _before(at, links)
        inputs += (_input(at, given, state, row_stride, channel, channels, BEFORE),)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(BEFORE):
        factor = tl.load(weight + channel * (BEFORE + 1) + tap, mask=inside, other=0.0).to(tl.float32)
        total = total + inputs[BEFORE - 1 - tap] * factor
    own = tl.load(given + row.to(tl.int64) * row_stride + channel, mask=inside, other=0.0)
    factor = tl.load(weight + channel * (BEFORE + 1) + BEFORE, mask=inside, other=0.0).to(tl.float32)
    total = total + own * factor
    if BIAS:
        total = total + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(made + (row - accepted).to(tl.int64) * channels + channel, total, mask=inside)


@triton.jit(do_not_specialize=["row_stride", "channels", "links_at", "ends_at"])
def hold_inputs(
    given, states, walk, row_stride, channels, links_at, ends_at, BEFORE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Put the last BEFORE inputs, at each of a request's ends, into the slot for it; arguments as in ``convolve``.

    All is read before anything is written: the request's own slot comes last.
    """
    request = walk + tl.program_id(0) * _REQUEST
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    links = walk + links_at
    state = states + tl.load(request + 2).to(tl.int64) * BEFORE * channels
    first = tl.load(request + 3)
    for number in range(first, first + tl.load(request + 4)):
        end = walk + ends_at + number * _END
        at = tl.load(end)
        slot = tl.load(end + 1).to(tl.int64)
        inputs = ()
        for _ in tl.static_range(BEFORE):
            inputs += (_input(at, given, state, row_stride, channel, channels, BEFORE),)
            at = _before(at, links)
        tl.debug_barrier()
        for back in tl.static_range(BEFORE):
            place = (slot * BEFORE + BEFORE - 1 - back) * channels + channel
            tl.store(states + place, inputs[back], mask=inside)
