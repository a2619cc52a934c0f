"""The retrieval service: one index in use at a time, replaced by a single assignment.

A new live version is fetched, verified and mapped while the old one answers. A version that is damaged, or built for another
tokenizer, is refused and logged, and the old one stays in use. If Redis goes away, the loaded version stays in use, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from retrieval_index.answers import RedisAnswers
from retrieval_index.cache_folder import prune
from retrieval_index.index import Index, check_index, open_index
from retrieval_index.store import IndexStore
from services.logs.names import log_name
from services.retrieval.config import RetrievalConfig
from speculation.errors import ConfigurationError, OutriderError, Unavailable
from speculation.files import write_whole
from speculation.messages import RetrievalQuery, Retrieved

log = logging.getLogger(__name__)

# Seconds of one wait for a change, and of the pauses between attempts while Redis does not answer.
_WATCH_S = 2.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.5, 30.0
# A refused version is tried again as well: what is wrong with it may lie here, or end. The pauses grow to the second number.
_REFUSED_FIRST_S, _REFUSED_MOST_S = 30.0, 3600.0
_LAST_LIVE = "last-live"


class RetrievalService:
    """Implements ``speculation.ports.Retriever``.

    Attributes:
        answers: the store of earlier answers; None: none are kept.
        refused: why the live version is not in use; None if it is.
        switches: how many times a new version came into use.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self._config = config
        self._index: Index | None = None
        self._store: IndexStore | None = None
        self._watching: asyncio.Task[None] | None = None
        self.answers = _answers(config)
        self.refused: str | None = None
        self.switches = 0

    @property
    def version(self) -> str | None:
        """Version of the index in use; None before one is loaded."""
        return None if self._index is None else self._index.manifest.version

    async def start(self) -> None:
        """Load the index; from Redis also follow its live version.

        Raises:
            ConfigurationError: the folder's index is unusable, or neither or both places are given.
        """
        config = self._config
        if (config.index is None) == (config.redis_url is None):
            raise ConfigurationError("set one of the two", field="retrieval.index and retrieval.redis_url")
        if config.index is not None:
            self._index = await asyncio.to_thread(self._open, config.index)
        elif config.redis_url is not None:
            self._store = IndexStore(config.redis_url, config.name, config.redis_password)
            self._watching = asyncio.create_task(self._follow(self._store), name="index-changes")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._store is not None:
            self._store.close()
        if self.answers is not None:
            await self.answers.close()

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        return self.look_up([query])[0]

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries, all from the same version.

        Raises:
            Unavailable: no index is loaded yet.
        """
        index = self._index
        if index is None:
            raise Unavailable(f"no index is loaded: {self.refused or 'none is live yet'}")
        if log.isEnabledFor(logging.DEBUG):
            for query in queries:
                log.debug("look-up for %s", log_name(query.session_id, query.traceparent))
        return index.look_up(queries)

    async def _follow(self, store: IndexStore) -> None:
        seen: str | None = None
        delay = _RETRY_FIRST_S
        clock = asyncio.get_running_loop().time
        again_at, pause = float("inf"), _REFUSED_FIRST_S
        while True:
            try:
                if seen is None:
                    # The end of the stream is read before the live version, so that no change in between is missed.
                    latest: str | None = await asyncio.to_thread(store.last_change)
                else:
                    latest = await asyncio.to_thread(store.wait_for_change, seen, _WATCH_S)
                if latest is not None:
                    again_at, pause = clock(), _REFUSED_FIRST_S
                if clock() >= again_at:
                    in_use = await self._use_live(store)
                    again_at, pause = (float("inf") if in_use else clock() + pause), min(2 * pause, _REFUSED_MOST_S)
                    seen = latest or seen
                delay = _RETRY_FIRST_S
                continue
            except Unavailable as error:
                self._note(str(error))
                seen = None
            except Exception as error:
                log.exception("following the index failed; trying again")
                self._note(f"{type(error).__name__}: {error}")
                seen = None
            if self._index is None:
                await asyncio.to_thread(self._use_last, store)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_MOST_S)

    async def _use_live(self, store: IndexStore) -> bool:
        """Use the live version, if there is one; False: it is refused."""
        version = await asyncio.to_thread(store.live)
        if version is None or version == self.version:
            self.refused = None
            return True
        try:
            index = await asyncio.to_thread(self._load, store, version)
        except ConfigurationError as error:
            self._note(f"version {version} is refused: {error}")
            return False
        self._index, self.refused = index, None
        self.switches += 1
        log.info("the index in use is version %s now", version)
        return True

    def _load(self, store: IndexStore, version: str) -> Index:
        cache = self._cache(store)
        manifest = store.manifest(version)
        config, origin = self._config, f"{version} at {store.origin}"
        check_index(manifest, config.tokenizer_sha256, origin, semantic=config.state_width is not None)
        # fetch has verified the files, so a large index is not read again.
        index = Index(store.fetch(version, cache), manifest, config.state_width)
        try:
            write_whole(cache / _LAST_LIVE, version.encode())
            prune(cache, {version, *store.history()})
        except OSError as error:
            log.warning("cannot tidy up %s: %s", cache, error)
        return index

    def _use_last(self, store: IndexStore) -> None:
        """If Redis cannot be reached at start: serve the version that was live last."""
        try:
            version = (self._cache(store) / _LAST_LIVE).read_text()
            index = self._open(self._cache(store) / Path(version).name)
            if index.manifest.version != version:
                raise ValueError(f"{index.manifest.version} is in the place of {version}")
        except (OSError, ValueError, OutriderError) as error:
            log.debug("no index from earlier: %s", error)
            return
        self._index = index
        log.error("Redis cannot be reached; serving version %s, which was live last", version)

    def _open(self, folder: Path) -> Index:
        return open_index(folder, self._config.tokenizer_sha256, self._config.state_width)

    def _cache(self, store: IndexStore) -> Path:
        """The folder depends on the Redis server, too: another server may use the same name for another index."""
        where = hashlib.sha256(store.origin.encode()).hexdigest()[:12]
        return self._config.cache_dir / f"{self._config.name}-{where}"

    def _note(self, why: str) -> None:
        if why != self.refused:
            log.error("the index in use stays: %s", why)
        self.refused = why


def _answers(config: RetrievalConfig) -> RedisAnswers | None:
    kept = config.answers
    if not kept.max_tokens or config.redis_url is None:
        return None
    return RedisAnswers(
        config.redis_url,
        config.name,
        config.redis_password,
        tokenizer=config.tokenizer_sha256 or "",
        max_tokens=kept.max_tokens,
        kept_s=kept.kept_s,
        secret=kept.key,
    )
