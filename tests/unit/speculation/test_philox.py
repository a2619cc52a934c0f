"""The counter-based generator against the reference implementation's published vectors (Random123, kat_vectors)."""

import numpy as np
import pytest
from scipy import stats

from speculation.philox import NoiseStream, gumbel, gumbels, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: int, expected: list[int]) -> None:
    result = philox4x32(np.array(counter, dtype=np.uint64)[:, None], key)
    assert result[:, 0].tolist() == expected


def test_a_number_does_not_depend_on_what_else_is_asked_for() -> None:
    everything = uniforms(5, NoiseStream.CHOICE, 9, np.arange(1000))
    some = np.array([999, 3, 500, 4])
    assert np.array_equal(uniforms(5, NoiseStream.CHOICE, 9, some), everything[some])
    assert np.array_equal(uniforms(5, NoiseStream.CHOICE, 9, np.arange(100, 200)), everything[100:200])
    assert len(uniforms(5, NoiseStream.CHOICE, 9, np.arange(0))) == 0


OTHERS = [
    (6, NoiseStream.CHOICE, 9),
    (5, NoiseStream.ACCEPT, 9),
    (5, NoiseStream.CHOICE, 10),
    (5 + 2**32, NoiseStream.CHOICE, 9),
]


@pytest.mark.parametrize("other", OTHERS)
def test_seed_stream_and_position_all_matter(other: tuple[int, NoiseStream, int]) -> None:
    index = np.arange(64)
    assert not np.any(uniforms(5, NoiseStream.CHOICE, 9, index) == uniforms(*other, index))


def test_noise_of_many_requests_is_that_of_each() -> None:
    seeds, positions = (1, 2**63 + 5, 7, 2**64 - 1), (0, 9, 2**33 + 1, 2**32 - 1)
    for indices in ((0, 1, 2, 3), (5, 1000, 7, 131_071)):
        arrays = np.array(seeds, dtype=np.uint64), NoiseStream.CHOICE, np.array(positions), np.array(indices)
        each = [
            gumbel(seed, NoiseStream.CHOICE, position, np.array([index]))[0]
            for seed, position, index in zip(seeds, positions, indices, strict=True)
        ]
        assert gumbels(*arrays).tolist() == each


def test_draws_are_uniform_and_gumbel() -> None:
    index = np.arange(20_000)
    assert stats.kstest(uniforms(1, NoiseStream.CHOICE, 0, index), "uniform").pvalue > 1e-3
    assert stats.kstest(gumbel(1, NoiseStream.CHOICE, 1, index), "gumbel_r").pvalue > 1e-3
