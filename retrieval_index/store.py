"""Versions of an index in Redis: manifests, files, the live version, and a stream of its changes.

Keys of the index ``name`` (the braces keep them in one slot of a cluster)::

    outrider:{name}:manifest:VERSION        the manifest
    outrider:{name}:part:VERSION:PART:n     pieces of a file
    outrider:{name}:live                    the live version
    outrider:{name}:history                 versions that were live, latest first; the last two are kept
    outrider:{name}:changes                 stream with one entry for every change of the live version
    outrider:{name}:publisher               lock, held by the current publisher

Everything read from Redis is treated as untrusted: sizes, checksums and names are checked.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import redis

from retrieval_index.access import without_password
from retrieval_index.cache_folder import PARTIAL, is_whole
from retrieval_index.manifest import FILE, FilePart, Manifest, part_of, read_manifest, verify
from retrieval_index.progress import Advance, silent
from retrieval_index.redis_errors import speaking
from speculation.errors import ConfigurationError, Unavailable

log = logging.getLogger(__name__)

_PIECE = 8 << 20
# The lock of a dead publisher expires after this time; a living one renews it with every piece.
_LOCK_MS = 30_000
_TIMEOUT_S = 5.0
_CHANGES_KEPT = 100
# The live version and its predecessor.
_VERSIONS_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version stored in Redis."""

    version: str
    manifest: Manifest
    live: bool


class _Turn:
    """The publisher lock, which expires unless it is renewed."""

    def __init__(self, client: redis.Redis, key: str, name: str) -> None:
        self.key = key
        self._redis, self._name = client, name
        self._mine = secrets.token_hex(16).encode()

    def take(self) -> bool:
        """Try to take the lock; whether that succeeded."""
        return bool(self._redis.set(self.key, self._mine, nx=True, px=_LOCK_MS))

    def keep(self) -> None:
        """Renew the lock.

        Raises:
            Unavailable: another publisher holds it.
        """
        if self._redis.get(self.key) != self._mine or not self._redis.pexpire(self.key, _LOCK_MS):
            raise Unavailable(f"another publisher has taken over {self._name}; the live index is untouched")

    def check(self, watching: Any) -> None:
        """Check the lock again after WATCH: from here on, a change of the lock aborts the transaction.

        Raises:
            Unavailable: another publisher holds it.
        """
        if watching.get(self.key) != self._mine:
            raise Unavailable(f"another publisher has taken over {self._name}; the live index is untouched")

    def end(self) -> None:
        """Release the lock, unless it is another publisher's by now."""
        try:
            with self._redis.pipeline(transaction=True) as together:
                together.watch(self.key)  # type: ignore[no-untyped-call]
                if together.get(self.key) == self._mine:
                    together.multi()
                    together.delete(self.key)
                    together.execute()
        except redis.exceptions.WatchError:
            return


class IndexStore:
    """The versions of one index.

    Args:
        url: ``redis://`` or ``rediss://``, with user, password and TLS options as redis-py reads them.
        name: the index's name in Redis.
        password: used where the URL holds none; taken as it is, with nothing to escape.
        piece_bytes: a file is kept in pieces of so many bytes; all who use an index must say the same.

    Raises:
        ConfigurationError: the URL is malformed.
    """

    def __init__(self, url: str, name: str, password: str | None = None, *, piece_bytes: int = _PIECE) -> None:
        self._name, self._piece = name, piece_bytes
        self.origin = without_password(url)
        try:
            self._redis = redis.Redis.from_url(
                url, password=password, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        except ValueError:
            # redis-py's own message may contain the password.
            raise ConfigurationError("not a Redis URL; give redis://USER:PASSWORD@HOST:PORT", field=self.origin) from None

    def publish(
        self,
        folder: Path,
        *,
        promote: bool = True,
        patience_s: float = 60.0,
        advance: Advance = silent,
    ) -> str:
        """Upload an index and, with ``promote``, make it live; returns its version.

        Waits while another publisher is at work. The live version changes only in the last step.

        Raises:
            ConfigurationError: the index is damaged.
            Unavailable: Redis cannot be reached or refuses, or another publisher takes longer than ``patience_s``.
        """
        manifest = read_manifest(folder)
        verify(folder, manifest)
        version = manifest.version
        with speaking(self.origin), self._publishing(patience_s) as turn:
            self._sweep(version)
            for name, part in manifest.parts.items():
                self._upload(folder / name, version, name, part, turn, advance)
            turn.keep()
            self._redis.set(self._key("manifest", version), manifest.to_json())
            if promote:
                self._make_live(version, turn)
        return version

    def versions(self) -> list[Published]:
        """All versions with a valid manifest, the live one first.

        Raises:
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            live = self.live()
            keys = sorted(self._text(key) for key in self._redis.scan_iter(self._key("manifest", "*"), count=1000))
            versions = [key.rpartition(":")[2] for key in keys]
            found = []
            for version in versions:
                try:
                    found.append(Published(version=version, manifest=self.manifest(version), live=version == live))
                except ConfigurationError as error:
                    # Deleted meanwhile, or damaged: the others are still listed.
                    log.warning("a version is left out: %s", error)
        return sorted(found, key=lambda each: not each.live)

    def live(self) -> str | None:
        """The live version; None if no version is live.

        Raises:
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            found = self._redis.get(self._key("live"))
            return None if found is None else self._text(found)

    def history(self) -> list[str]:
        """The live version and its kept predecessors, latest first.

        Raises:
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            entries = cast(list[Any], self._redis.lrange(self._key("history"), 0, _VERSIONS_KEPT - 1))
        return [self._text(entry) for entry in entries]

    def manifest(self, version: str) -> Manifest:
        """A version's manifest.

        Raises:
            ConfigurationError: there is no such version, or it is damaged.
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            text = self._redis.get(self._key("manifest", version))
        if text is None:
            raise ConfigurationError(f"there is no version {version} of {self._name} at {self.origin}", about=version)
        manifest = Manifest.from_json(cast(bytes, text), f"version {version} at {self.origin}")
        if manifest.version != version:
            raise ConfigurationError(f"the manifest of version {version} at {self.origin} has been altered", about=version)
        return manifest

    def promote(self, version: str) -> None:
        """Make a version live.

        Raises:
            ConfigurationError: there is no such version, or it is damaged.
            Unavailable: Redis cannot be reached or refuses, or another publisher is at work.
        """
        with speaking(self.origin), self._publishing(_TIMEOUT_S) as turn:
            self.manifest(version)
            self._make_live(version, turn)

    def rollback(self) -> str:
        """Make the previously live version live again; returns it.

        Raises:
            ConfigurationError: there is none, or it is damaged.
            Unavailable: Redis cannot be reached or refuses, or another publisher is at work.
        """
        with speaking(self.origin), self._publishing(_TIMEOUT_S) as turn:
            history = self.history()
            if len(history) < 2:
                raise ConfigurationError(
                    f"{self._name} at {self.origin} has had no version before the live one", about=self._name
                )
            self.manifest(history[1])
            self._make_live(history[1], turn)
        return history[1]

    def delete(self, version: str) -> None:
        """Delete a version that is not live.

        Raises:
            ConfigurationError: it is live, or there is no such version.
            Unavailable: Redis cannot be reached or refuses, or another publisher is at work.
        """
        with speaking(self.origin), self._publishing(_TIMEOUT_S):
            if version == self.live():
                raise ConfigurationError(
                    f"version {version} of {self._name} is live: promote another one first", about=version
                )
            if not self._redis.exists(self._key("manifest", version)):
                raise ConfigurationError(f"there is no version {version} of {self._name} at {self.origin}", about=version)
            self._redis.lrem(self._key("history"), 0, version)
            self._forget(version)

    def fetch(self, version: str, cache: Path) -> Path:
        """Download a version into ``cache`` unless it is there, and verify it; returns its folder.

        Raises:
            ConfigurationError: there is no such version, or a part of it is missing, cut off or altered.
            Unavailable: Redis cannot be reached or refuses.
            OSError: the cache cannot be read or written.
        """
        folder = cache / version
        if is_whole(folder, version):
            return folder
        # What is there is damaged.
        shutil.rmtree(folder, ignore_errors=True)
        manifest = self.manifest(version)
        partial = cache / f"{version}.{os.getpid()}.{secrets.token_hex(4)}{PARTIAL}"
        partial.mkdir(parents=True)
        try:
            with speaking(self.origin):
                for name, part in manifest.parts.items():
                    self._download(partial / name, version, name, part)
            (partial / FILE).write_text(manifest.to_json())
            try:
                os.replace(partial, folder)
            except OSError:
                # Another replica on this machine may have been faster.
                if not is_whole(folder, version):
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def last_change(self) -> str:
        """Id of the last entry in the stream of changes; "0" if it is empty.

        Raises:
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            latest = cast(list[Any], self._redis.xrevrange(self._key("changes"), count=1))
        return self._text(latest[0][0]) if latest else "0"

    def wait_for_change(self, after: str, seconds: float) -> str | None:
        """Wait up to ``seconds`` (at most 2.5) for a change after the entry ``after``.

        Returns:
            The id of the latest entry; None if nothing changed.

        Raises:
            Unavailable: Redis cannot be reached or refuses.
        """
        with speaking(self.origin):
            block = int(1000 * min(seconds, _TIMEOUT_S / 2))
            found = cast(Any, self._redis.xread({self._key("changes"): after}, block=block))
        if not found:
            return None
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))
        return self._text(entries[-1][0])

    def close(self) -> None:
        """Close the connections; they can also be closed by a ``with`` block."""
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_live(self, version: str, turn: _Turn) -> None:
        history = self._key("history")
        with self._redis.pipeline(transaction=True) as together:
            # The transaction fails if another publisher has taken the lock by now.
            turn.keep()
            together.watch(turn.key)  # type: ignore[no-untyped-call]
            turn.check(together)
            together.multi()
            together.set(self._key("live"), version)
            together.lrem(history, 0, version)
            together.lpush(history, version)
            together.xadd(self._key("changes"), {"live": version}, maxlen=_CHANGES_KEPT, approximate=True)
            together.execute()
        for old in cast(list[Any], self._redis.lrange(history, _VERSIONS_KEPT, -1)):
            self._forget(self._text(old))
        self._redis.ltrim(history, 0, _VERSIONS_KEPT - 1)

    def _forget(self, version: str) -> None:
        # The manifest goes first: without it the version does not exist, and a fetch in progress fails with an error.
        self._redis.delete(self._key("manifest", version))
        for key in self._redis.scan_iter(self._key("part", version, "*"), count=1000):
            self._redis.delete(key)

    def _sweep(self, version: str) -> None:
        """Delete the pieces that interrupted publishers left, except those of ``version``."""
        for key in self._redis.scan_iter(self._key("part", "*"), count=1000):
            owner = self._text(key).removeprefix(self._key("part", "")).partition(":")[0]
            if owner != version and not self._redis.exists(self._key("manifest", owner)):
                self._redis.delete(key)

    def _upload(self, file: Path, version: str, name: str, part: FilePart, turn: _Turn, advance: Advance) -> None:
        sent = 0
        with file.open("rb") as content:
            for number, piece in enumerate(iter(lambda: content.read(self._piece), b"")):
                turn.keep()
                self._redis.set(self._key("part", version, name, str(number)), piece)
                sent += len(piece)
                advance(name, sent, part.size)

    def _download(self, file: Path, version: str, name: str, part: FilePart) -> None:
        what = f"{name} of version {version} at {self.origin}"
        with file.open("wb") as content:
            for number in range(-(-part.size // self._piece)):
                piece = cast(bytes | None, self._redis.get(self._key("part", version, name, str(number))))
                if piece is None or len(piece) > self._piece:
                    raise ConfigurationError(f"{what} is not whole: piece {number}", about=name)
                content.write(piece)
        if part_of(file).sha256 != part.sha256:
            raise ConfigurationError(f"{what} has been altered: wrong checksum", about=name)

    @contextmanager
    def _publishing(self, patience_s: float) -> Iterator[_Turn]:
        """Hold the publisher lock during the block."""
        turn = _Turn(self._redis, self._key("publisher"), self._name)
        deadline = time.monotonic() + patience_s
        while not turn.take():
            if time.monotonic() > deadline:
                raise Unavailable(f"another publisher has been at work on {self._name} for {patience_s:.0f} s; try again")
            time.sleep(0.1)
        try:
            yield turn
        finally:
            turn.end()

    def _key(self, *parts: str) -> str:
        return ":".join(("outrider", "{" + self._name + "}", *parts))

    @staticmethod
    def _text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)
