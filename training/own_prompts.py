"""Prompts that the target makes itself: it is given its chat template up to the user's message, and writes that."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.api.messages import ChatMessage
from services.router.tokens import Tokens
from services.verifier.engine.loop import DecodingLoop
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.types import FinishReason, Plan, SamplingParams
from training.generate import DataProgress
from training.prompt_files import EncodedPrompt
from training.tasks import seed_of

FILE = "own-prompts.json"
DOMAIN = "own"
# A run that is killed loses fewer messages than this.
_SAVE_EVERY = 16
# Messages that do not end by themselves are dropped.
_MOST_TOKENS = 128
# Two messages with nothing in common, neither in their first nor in their last token.
_PROBES = ("Why?", "4 + 5")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnFrame:
    """What the chat template puts before and after a user's message, in tokens."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def turn_frame(tokens: Tokens) -> TurnFrame:
    """The frame of a conversation's first message.

    Raises:
        ConfigurationError: the model has no chat template, or one that does not frame the message.
    """
    if not tokens.has_chat_template:
        raise ConfigurationError(
            "this model has no chat template, from which it could make its own", field="--prompts", value="missing"
        )
    one, other = (tokens.encode_chat([ChatMessage(role="user", content=probe)]) for probe in _PROBES)
    before, after = _in_common(one, other), _in_common(one[::-1], other[::-1])[::-1]
    if not before or not after:
        raise ConfigurationError(
            "this model's chat template does not mark where a message ends", field="--prompts", value="missing"
        )
    return TurnFrame(before=before, after=after)


def end_of_turn(tokens: Tokens) -> frozenset[int]:
    """The token with which the chat template ends a message; empty if there is none."""
    try:
        return frozenset(turn_frame(tokens).after[:1])
    except ConfigurationError:
        return frozenset()


def _in_common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return tuple(one[:same])


class OwnPrompts:
    """Makes prompts numbered from 0; those made in earlier runs are read from the folder.

    Args:
        origin: identifies the target; prompts of another one are not used.
    """

    def __init__(self, out: Path, origin: str, frame: TurnFrame, count: int, seed: int, eos: frozenset[int]) -> None:
        self._out = out
        self._frame = frame
        self._count = count
        self._seed = seed
        self._ends = eos | {frame.after[0]}
        self._key = hashlib.sha256(f"{origin} {frame} {seed}".encode()).hexdigest()
        self._made = self._read()
        self._queue = iter([number for number in range(count) if number not in self._made])
        done = count - sum(number not in self._made for number in range(count))
        self.progress = DataProgress(stage="own prompts", total=count, done=done, before=done)

    async def work(self, loop: DecodingLoop, concurrency: int) -> None:
        """Make what is missing, and save it now and then; if it is cancelled, what has been made is kept.

        Raises:
            OutriderError: the target failed.
            ConfigurationError: the prompts cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as makers:
                for _ in range(concurrency):
                    makers.create_task(self._make_all(loop))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if self.progress.done > self.progress.before:
                self._save()

    def prompts(self) -> Iterator[EncodedPrompt]:
        """The usable ones: messages that ended by themselves and are not empty, each once, by their number."""
        seen: set[tuple[int, ...]] = set()
        for number in range(self._count):
            message = tuple(self._made[number])
            if not message or message in seen:
                continue
            seen.add(message)
            digest = hashlib.sha256(f"{DOMAIN} {message}".encode()).hexdigest()[:16]
            yield EncodedPrompt(domain=DOMAIN, digest=digest, tokens=(*self._frame.before, *message, *self._frame.after))

    async def _make_all(self, loop: DecodingLoop) -> None:
        for number in self._queue:
            self._made[number] = await self._make(loop, number)
            self.progress.done += 1
            if self.progress.done % _SAVE_EVERY == 0:
                self._save()

    async def _make(self, loop: DecodingLoop, number: int) -> list[int]:
        """A message's tokens; none if it did not end."""
        name = f"{DOMAIN}-{number}"
        request = GenerationRequest(
            request_id=name,
            prompt=self._frame.before,
            sampling=SamplingParams(
                temperature=1.0,
                seed=seed_of(self._seed, name),
                max_tokens=_MOST_TOKENS,
                stop_token_ids=tuple(self._ends),
                ignore_generation_config=True,
            ),
            plan=Plan(strategy="autoregressive"),
        )
        said: list[int] = []
        reason = None
        async for event in loop.generate(request):
            if isinstance(event, Progress):
                said.extend(event.token_ids)
                self.progress.tokens += len(event.token_ids)
            elif isinstance(event, Finished):
                reason = event.reason
        return [token for token in said if token not in self._ends] if reason is FinishReason.STOP else []

    def _read(self) -> dict[int, list[int]]:
        with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
            kept = json.loads((self._out / FILE).read_bytes())
            if kept["key"] == self._key:
                return {int(number): [int(token) for token in message] for number, message in kept["prompts"].items()}
        return {}

    def _save(self) -> None:
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            write_whole(self._out / FILE, json.dumps({"key": self._key, "prompts": self._made}).encode())
        except OSError as error:
            raise ConfigurationError(
                f"{self._out / FILE} cannot be written ({error.strerror}): make room and run the same command again",
                about=self._out / FILE,
            ) from error
