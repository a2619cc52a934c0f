"""Two versions of one model's weights, routers that change from one to the other, and answers that name theirs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import router_config
from cluster.settings.config import load
from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.api.messages import ClientRequest, Completion, RequestedSampling, RouterPort, TextChunk
from services.router.config import RouterWaits
from services.router.service import RouterService
from speculation.messages import GenerationRequest
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from speculation.types import StructuredOutputs
from tests.running.patience import until
from tests.servers.service import pipeline, tiny_settings
from tests.servers.verifier_links import in_process, over_grpc
from tests.tiny_models.new_weights import FILE, other_weights, write

LINKS = {"in process": in_process, "over gRPC": over_grpc}
TEXT = "the quick brown fox jumps over the lazy dog, the quick brown fox"
# Of different requests.
COUNT = 10
_FORM = StructuredOutputs(kind="regex", text="([a-z ]|[0-9]){60,70}")
ASKED: tuple[dict[str, Any], ...] = (
    {"strategy": "auto"},
    {"strategy": "prompt_lookup", "sampling": {"temperature": 1.0, "seed": 1}},
    {"strategy": "autoregressive", "sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.1}},
    {"strategy": "recycling", "sampling": {"temperature": 1.0, "seed": 3, "structured_outputs": _FORM, "ignore_eos": False}},
    {"strategy": "suffix", "sampling": {"logprobs": 1}},
)


def wanted(number: int, *, whole: bool = False, tokens: int = 250) -> ClientRequest:
    asked = ASKED[number % len(ASKED)]
    sampling = RequestedSampling(**{"max_tokens": tokens, "ignore_eos": True, **asked.get("sampling", {})})
    return ClientRequest(input=f"{TEXT} {number}", sampling=sampling, strategy=asked["strategy"], tenant="t", whole=whole)


@dataclass(kw_only=True)
class Answered:
    """Tokens of an answer as its reader has them, and what it names."""

    tokens: list[int] = field(default_factory=list)
    restarted: bool = False
    arithmetic: str = ""
    cached: int = 0

    def take(self, event: TextChunk | Completion) -> None:
        if isinstance(event, Completion):
            self.arithmetic, self.cached = event.arithmetic, event.cached_tokens
            assert event.completion_tokens == len(self.tokens)
            return
        if event.restarted:
            self.restarted = True
            self.tokens.clear()
        self.tokens += event.token_ids


async def answered(router: RouterPort, request: ClientRequest, told: Answered | None = None) -> Answered:
    told = told or Answered()
    async for event in router.generate(request):
        told.take(event)
    assert told.arithmetic
    return told


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Two models of one form in a folder that weights may be read from, and their plain answers."""

    folder: Path
    plain: dict[tuple[str, int], list[int]]
    names: dict[str, str]

    def check(self, number: int, answer: Answered, version: str | None = None, tokens: int | None = None) -> None:
        """That an answer is plain decoding's of the version that it names, of which so many ``tokens`` were asked for."""
        named = next(name for name, arithmetic in self.names.items() if arithmetic == answer.arithmetic)
        assert answer.tokens == self.plain[named, number][:tokens]
        assert version in (None, named)


async def make_versions(tiny_model: Path, folder: Path) -> Versions:
    """Write both versions below ``folder``, and ask each of them."""
    shutil.copytree(tiny_model, folder / "a")
    other_weights(tiny_model, folder / "b")
    plain: dict[tuple[str, int], list[int]] = {}
    names = {}
    for version in ("a", "b"):
        async with pipeline(folder / version) as running:
            asked = [replace(wanted(number), strategy="autoregressive") for number in range(COUNT)]
            # Together: a batch has the bits of each alone.
            for number, answer in enumerate(await asyncio.gather(*(answered(running.router, each) for each in asked))):
                plain[version, number], names[version] = answer.tokens, answer.arithmetic
    assert all(plain["a", number] != plain["b", number] for number in range(COUNT))
    return Versions(folder=folder, plain=plain, names=names)


@asynccontextmanager
async def serving(
    versions: Versions,
    *links: str,
    between: Callable[[int, VerifierPort], Any] = lambda number, verifier: verifier,
    flags: Sequence[str] = (),
    waits: RouterWaits = RouterWaits(),  # noqa: B008
) -> AsyncIterator[RouterService]:
    """A router in front of one verifier of version a for each link."""
    model = ResolvedModel(name="tiny", path=versions.folder / "a")
    given = [f"verifier.weights_from=['{versions.folder}']", "verifier.max_num_seqs=8", *flags]
    async with AsyncExitStack() as stack:
        verifiers = []
        for number, link in enumerate(links):
            running = await stack.enter_async_context(pipeline(model.path, *given))
            verifiers.append(await stack.enter_async_context(LINKS[link](between(number, running.verifier))))
        settings = load(flags=tiny_settings(*given), environ={})
        yield RouterService(replace(router_config(settings, model), waits=waits), ChosenVerifier(verifiers))


@dataclass
class Between:
    """Implements ``VerifierPort`` by another one; ``before`` is called with each step of a reload, and ``after``."""

    verifier: VerifierPort
    before: Callable[[str], Awaitable[None]] | None = None
    after: Callable[[str], Awaitable[None]] | None = None

    def generate(self, request: GenerationRequest) -> Any:
        return self.verifier.generate(request)

    async def reload(self, order: ReloadOrder) -> str:
        if self.before is not None:
            await self.before(order.step)
        done = await self.verifier.reload(order)
        if self.after is not None:
            await self.after(order.step)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verifier, name)


class Asked:
    """Requests that are made as soon as the new weights have been read, some of them of answers that are sent as a whole."""

    def __init__(self, whole: Callable[[int], bool]) -> None:
        self.whole = whole
        self.router: RouterPort | None = None
        self.answers: dict[int, Answered] = {}
        self.tasks: list[asyncio.Task[Answered]] = []
        # Of requests that come when all is quiet.
        self.late: list[asyncio.Task[Answered]] = []

    async def after(self, step: str) -> None:
        """Ask once more, during the pause."""
        if step == "pause" and self.router is not None:
            self.late.append(asyncio.create_task(answered(self.router, wanted(0))))
            await asyncio.sleep(0.05)
            assert not self.late[0].done()

    async def before(self, step: str) -> None:
        """Ask, and wait until the first answers have begun."""
        if step != "pause" or self.router is None:
            return
        # Those that may begin again come last, and so are still under way then: to compile another one's grammar takes a while.
        for whole in (False, True):
            numbers = [number for number in range(COUNT) if self.whole(number) is whole]
            for number in numbers:
                told = self.answers[number] = Answered()
                request = wanted(number, whole=whole)
                self.tasks.append(asyncio.create_task(answered(self.router, request, told)))
            await until(lambda numbers=numbers: all(self.answers[number].tokens for number in numbers if number < 4))

    async def check(self, versions: Versions, version: str | None = None) -> None:
        await asyncio.gather(*self.tasks)
        for number, told in self.answers.items():
            versions.check(number, told, version)


def as_halves(folder: Path) -> None:
    """Let the weights be stored in bfloat16."""
    write(folder, {name: weight.bfloat16() for name, weight in load_file(folder / FILE).items()})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
