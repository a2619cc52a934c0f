"""The folder of a Ray that was started here: its logs, and the sockets by which its processes talk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speculation.errors import ConfigurationError

# The longest path of a socket that Linux takes, and what Ray appends to the folder: a session's name and its socket's.
_LONGEST = 107
_WITHIN = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"


@contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for Ray within one that no other user may enter; removed after the block, unless that fails.

    Ray's own, /tmp/ray, is open to everybody, and so are its sessions (mode 0777): their logs, and sockets that
    ask for no token. It lies where ``RAY_TMPDIR`` or ``TMPDIR`` says, as Ray's own would.

    Raises:
        ConfigurationError: it cannot be made there.
    """
    where = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()
    try:
        # Mode 0700, and a name that nobody can have taken before.
        private = Path(tempfile.mkdtemp(prefix="ray-", dir=where))
    except OSError as error:
        raise ConfigurationError(
            f"cannot be written to ({error.strerror}); name another folder for Ray's sessions",
            field="RAY_TMPDIR",
            value=where,
        ) from error
    if len(f"{private}{_WITHIN}".encode()) > _LONGEST:
        private.rmdir()
        raise ConfigurationError(
            "too long for the sockets that Ray makes below it; name a shorter one", field="RAY_TMPDIR", value=where
        )
    yield private / "ray"
    # Not where the block fails: the logs say why.
    shutil.rmtree(private, ignore_errors=True)
