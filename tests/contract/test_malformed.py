"""Malformed messages, gRPC and HTTP, against every server: each ends in the right status, none in a crash, and all serve on.

``python -m tests.chaos.malformed`` sends a million of them.
"""

from __future__ import annotations

import gc
import logging
import random
from pathlib import Path

import pytest

from tests.chaos.malformed import Attack
from tests.servers import malformed_grpc, malformed_http
from tests.servers.malformed_service import all_servers

MESSAGES, SEED = 1000, 1


@pytest.mark.examples(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, 3 * MESSAGES, MESSAGES))
async def test_whatever_comes_is_answered_and_harms_nothing(
    first: int, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What earlier tests have left behind speaks when it is collected.
    gc.collect()
    with caplog.at_level(logging.ERROR):
        # On its way out it checks that nothing is left of any request.
        async with all_servers(tiny_model) as addresses:
            attack = Attack(addresses, SEED)
            await attack.send(range(first, first + MESSAGES))
    assert attack.found.wrong == []
    assert attack.found.good > MESSAGES // 100
    said = [caplog.handler.format(record) for record in caplog.records if not _of_a_lost_client(record)]
    assert "Traceback" not in "\n".join(said)
    ends = attack.found.ends
    assert ends.total() == MESSAGES
    # It is a test of answers as well as of refusals.
    for protocol, end in (("gRPC", "OK"), ("gRPC", "INVALID_ARGUMENT"), ("HTTP", "200"), ("HTTP", "400")):
        assert sum(count for (name, _, how), count in ends.items() if (name, how) == (protocol, end)) > MESSAGES / 200


def _of_a_lost_client(record: logging.LogRecord) -> bool:
    """grpc could not send a status, since the client had gone meanwhile; it says so itself, and nothing of ours had a part in it."""
    return record.name == "grpc._cython.cygrpc" and "ExecuteBatchError raised in core" in record.getMessage()


def test_a_number_of_a_seed_is_one_message() -> None:
    for make in (malformed_grpc.call, lambda source: malformed_http.exchange(source, "127.0.0.1:1")):
        first, again, other = (make(random.Random(seed)) for seed in ("1 7", "1 7", "1 8"))  # type: ignore[operator]
        assert first == again
        assert first != other


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([], "0 answers"),
        ([(200, b""), (200, b"")], "2 answers"),
        ([(500, b"{}")], "status 500"),
        ([(400, b"Traceback")], "traceback"),
    ],
)
def test_wrong_answers_are_seen(answers: list[tuple[int, bytes]], words: str) -> None:
    made = malformed_http.Exchange("bad", b"", malformed_http.BAD)
    assert words in malformed_http.wrong_with(made, answers)
    assert not malformed_http.wrong_with(made, [(400, b"{}")])
