"""What processes of a target tell each other through torch's store may be longer than a value there."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from services.verifier.stages.long_values import MOST_CHARACTERS, get_long, set_long


@pytest.mark.parametrize(
    "text", ["", "é", "x" * MOST_CHARACTERS, "ab€" * (3 << 20)], ids=["none", "short", "a part", "15 MiB"]
)
def test_a_text_of_any_length_arrives(text: str) -> None:
    patience = timedelta(seconds=60)
    theirs = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    set_long(TCPStore("127.0.0.1", theirs.port, None, False, patience), "told", text)
    assert get_long(theirs, "told") == text
