"""One model that drafts: its sessions, and the batches that it drafts in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from services.drafter.sessions.known_states import KnownStates
from services.drafter.sessions.thread import DraftingThread
from services.drafter.sources.interfaces import Ahead, AheadWanted, DraftsAhead, DraftWanted, ModelSource, SourceSession
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.types import EMPTY_TREE, TokenTree

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    session_id: str
    max_nodes: int
    min_probability: float
    states: KnownStates
    answer: asyncio.Future[TokenTree | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedAhead:
    max_nodes: int
    min_probability: float
    most: int
    answer: asyncio.Future[Sequence[Ahead]]


class ModelGroup:
    """Drafts for all waiting sessions in one batch; sessions that arrive meanwhile make up the next batch.

    Drafts ahead are made while no session waits, and end once one does.

    The model is made and called in a thread of its own. A session whose draft fails is not drafted for again; the others
    go on.

    Args:
        name: name of the source, and of its drafts' group.
        make: makes the model; called in its thread when the first session is opened.
    """

    def __init__(self, name: str, make: Callable[[], ModelSource]) -> None:
        self.name = name
        self._make = make
        self._thread = DraftingThread(f"drafts-{name}")
        self._waiting: dict[str, _Asked] = {}
        self._begun: dict[str, _Asked] = {}
        self._ahead: dict[str, _AskedAhead] = {}
        self._batches: asyncio.Task[None] | None = None
        # Used in the model's thread only.
        self._model: ModelSource | None = None
        self._refused: ConfigurationError | None = None
        self._told = False
        self._sessions: dict[str, SourceSession] = {}

    def load(self) -> asyncio.Future[None]:
        """Make the model now; the result is its exception if it cannot be made."""
        return self._thread.run(self._load)

    def ended(self) -> asyncio.Future[None]:
        """Done when all that has been asked of the model so far is."""
        return self._thread.run(_nothing)

    def open(self, message: OpenSession) -> None:
        """Start a session, anew if it exists."""
        self._thread.run(self._open, message)

    def observe(self, report: StepReport) -> None:
        """Tell a session what a step committed."""
        self._thread.run(self._at, report.session_id, lambda session: session.observe(report))

    def draft(
        self, session_id: str, max_nodes: int, min_probability: float, states: KnownStates
    ) -> asyncio.Future[TokenTree | None]:
        """Ask for a draft. The result is None if the model cannot draft yet; a newer request of the session cancels it."""
        if (earlier := self._waiting.pop(session_id, None)) is not None:
            earlier.answer.cancel()
        asked = _Asked(
            session_id=session_id,
            max_nodes=max_nodes,
            min_probability=min_probability,
            states=states,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting[session_id] = asked
        self._work()
        return asked.answer

    def ahead(self, session_id: str, max_nodes: int, least: float, most: int) -> asyncio.Future[Sequence[Ahead]]:
        """Ask for drafts for at most ``most`` outcomes of the step that the session's last draft is for.

        Args:
            max_nodes: of each draft; 0: none is wanted.
            least: as ``DraftWanted.min_probability``.
        """
        self._drop_ahead(session_id)
        answer: asyncio.Future[Sequence[Ahead]] = asyncio.get_running_loop().create_future()
        if not max_nodes:
            answer.set_result(())
            return answer
        self._ahead[session_id] = _AskedAhead(max_nodes=max_nodes, min_probability=least, most=most, answer=answer)
        self._work()
        return answer

    def _drop_ahead(self, session_id: str) -> None:
        if (asked := self._ahead.pop(session_id, None)) is not None:
            _answer(asked.answer, ())

    def _work(self) -> None:
        if self._batches is None:
            self._batches = asyncio.create_task(self._draft_batches(), name=f"batches-{self.name}")

    def waiting_for(self, session_id: str) -> tuple[int, float] | None:
        """Most nodes and least probability of a draft that was asked for and has not begun; None: there is none."""
        asked = self._waiting.get(session_id)
        return None if asked is None else (asked.max_nodes, asked.min_probability)

    def close(self, session_id: str) -> None:
        """End a session; nobody waits for its drafts any more."""
        for asked in [self._waiting.pop(session_id, None), self._begun.pop(session_id, None)]:
            if asked is not None:
                _answer(asked.answer, None)
        self._drop_ahead(session_id)
        self._thread.run(self._close, session_id)

    def forget(self, tenant: str) -> asyncio.Future[None]:
        """Delete what the model remembers of a tenant's requests."""
        return self._thread.run(self._forget, tenant)

    async def _draft_batches(self) -> None:
        try:
            while self._waiting or self._ahead:
                if self._waiting:
                    await self._draft_batch()
                else:
                    await self._draft_batch_ahead()
        finally:
            self._batches = None

    async def _draft_batch(self) -> None:
        self._begun, self._waiting = self._waiting, {}
        batch = list(self._begun.values())
        try:
            trees = await self._thread.run(self._draft, batch)
        except Exception:
            log.exception("%s failed to draft for %d sessions", self.name, len(batch))
            trees = {}
        for asked in batch:
            _answer(asked.answer, trees.get(asked.session_id, EMPTY_TREE))
        self._begun = {}

    async def _draft_batch_ahead(self) -> None:
        batch, self._ahead = self._ahead, {}
        found: dict[str, Sequence[Ahead]] = {}
        try:
            found = await self._thread.run(self._draft_ahead, batch)
        except Exception:
            log.exception("%s failed to draft ahead for %d sessions", self.name, len(batch))
        for session_id, asked in batch.items():
            _answer(asked.answer, found.get(session_id, ()))

    # --- in the model's thread ------------------------------------------------------------------------------------

    def _load(self) -> None:
        self._made()

    def _made(self) -> ModelSource:
        if self._refused is not None:
            raise self._refused
        if self._model is None:
            try:
                self._model = self._make()
            except ConfigurationError as error:
                # Weights that are refused now are refused for the next request as well, after as long a look at them.
                self._refused = error
                raise
        return self._model

    def _open(self, message: OpenSession) -> None:
        try:
            self._sessions[message.session_id] = self._made().open(message)
        except ConfigurationError as error:
            if not self._told:
                log.error("%s cannot draft until the drafter is started anew: %s", self.name, error)
                self._told = True
            self._drop(message.session_id)
        except Exception:
            log.exception("%s drafts nothing for session %s", self.name, message.session_id)
            self._drop(message.session_id)

    def _at(self, session_id: str, function: Callable[[SourceSession], None]) -> None:
        session = self._sessions.get(session_id)
        try:
            if session is not None:
                function(session)
        except Exception:
            log.exception("%s drafts nothing more for session %s", self.name, session_id)
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        """Give up a session that has failed; what it holds of the text goes with it."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            with suppress(Exception):
                session.close()

    def _close(self, session_id: str) -> None:
        self._at(session_id, lambda session: session.close())
        self._sessions.pop(session_id, None)

    def _forget(self, tenant: str) -> None:
        if self._model is not None:
            self._model.forget(tenant)

    def _draft(self, batch: list[_Asked]) -> dict[str, TokenTree | None]:
        wanted = {
            asked.session_id: DraftWanted(
                session=session,
                max_nodes=asked.max_nodes,
                min_probability=asked.min_probability,
                states=asked.states,
            )
            for asked in batch
            if (session := self._sessions.get(asked.session_id)) is not None
        }
        if self._model is None or not wanted:
            return {}
        try:
            drafted = self._model.draft(list(wanted.values()))
            return {name: tree and self._labelled(tree) for name, tree in zip(wanted, drafted, strict=True)}
        except Exception:
            log.exception("%s failed to draft for %d sessions", self.name, len(wanted))
        if len(wanted) == 1:
            self._drop(next(iter(wanted)))
            return {}
        # One session may be to blame: draft for each alone, so that the others get theirs.
        trees: dict[str, TokenTree | None] = {}
        for asked in batch:
            trees |= self._draft([asked])
        return trees

    def _draft_ahead(self, batch: dict[str, _AskedAhead]) -> dict[str, Sequence[Ahead]]:
        wanted = {
            session_id: AheadWanted(
                session=session,
                max_nodes=asked.max_nodes,
                min_probability=asked.min_probability,
                most=asked.most,
            )
            for session_id, asked in batch.items()
            if (session := self._sessions.get(session_id)) is not None
        }
        model: object = self._model
        if not isinstance(model, DraftsAhead) or not wanted:
            return {}
        found = model.draft_ahead(list(wanted.values()), lambda: not self._waiting)
        labelled = ([replace(each, tree=self._labelled(each.tree)) for each in own] for own in found)
        return dict(zip(wanted, labelled, strict=True))

    def _labelled(self, tree: TokenTree) -> TokenTree:
        """The tree, with the source's name at its nodes: a model knows that of its kind."""
        if not tree or tree.sources[0] == self.name:
            return tree
        return replace(tree, sources=(self.name,) * len(tree))


def _nothing() -> None:
    """The last of the calls that are waited for."""


def _answer(answer: asyncio.Future[_Result], result: _Result) -> None:
    if not answer.done():
        answer.set_result(result)
