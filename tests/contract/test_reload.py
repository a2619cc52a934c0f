"""Weights replaced while serving: every answer is plain decoding's of the version that it names, and a refusal changes
nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cluster.build import router_config
from cluster.chosen_verifier import ChosenVerifier
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.api.messages import ClientRequest, Completion, RequestedSampling, RouterPort, TextChunk
from services.model_files.folder import weights_digest
from services.router import reloads
from services.router.service import RouterService
from services.verifier import reloading
from services.verifier.config import TargetConfig
from services.verifier.loading.replaceable import check_supported
from services.verifier.model import new_weights
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable
from speculation.messages import GenerationRequest, ReloadOrder, RunningAnswers
from speculation.ports import VerifierPort
from speculation.types import StructuredOutputs
from tests.mixture import make_mixture
from tests.new_weights import DAMAGES, FILE, other_weights, write
from tests.patience import until
from tests.refusals import refuses
from tests.service import pipeline, tiny_settings
from tests.tiny import make_tiny_model
from tests.verifier_links import in_process, over_grpc

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

    def check(self, number: int, answer: Answered, version: str | None = None) -> None:
        """That an answer is plain decoding's of the version that it names."""
        named = next(name for name, arithmetic in self.names.items() if arithmetic == answer.arithmetic)
        assert answer.tokens == self.plain[named, number]
        assert version in (None, named)


@pytest.fixture(scope="module")
async def versions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    folder = tmp_path_factory.mktemp("versions")
    shutil.copytree(tiny_model, folder / "a")
    other_weights(tiny_model, folder / "b")
    plain: dict[tuple[str, int], list[int]] = {}
    names = {}
    for version in ("a", "b"):
        async with pipeline(folder / version) as running:
            for number in range(COUNT):
                answer = await answered(running.router, replace(wanted(number), strategy="autoregressive"))
                plain[version, number], names[version] = answer.tokens, answer.arithmetic
    assert all(plain["a", number] != plain["b", number] for number in range(COUNT))
    return Versions(folder=folder, plain=plain, names=names)


@asynccontextmanager
async def serving(
    versions: Versions,
    *links: str,
    between: Callable[[int, VerifierPort], Any] = lambda number, verifier: verifier,
    flags: Sequence[str] = (),
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
        yield RouterService(router_config(settings, model), ChosenVerifier(verifiers))


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
        for number in range(COUNT):
            told = self.answers[number] = Answered()
            request = wanted(number, whole=self.whole(number))
            self.tasks.append(asyncio.create_task(answered(self.router, request, told)))
        await until(lambda: all(self.answers[number].tokens for number in range(4)))

    async def check(self, versions: Versions, version: str | None = None) -> None:
        await asyncio.gather(*self.tasks)
        for number, told in self.answers.items():
            versions.check(number, told, version)


_SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("link", "running"),
    [
        ("in process", "finish"),
        ("over gRPC", "restart"),
        pytest.param("in process", "restart", marks=_SLOW),
        pytest.param("over gRPC", "finish", marks=_SLOW),
    ],
)
async def test_every_answer_is_that_of_the_version_that_it_names(
    versions: Versions, link: str, running: RunningAnswers
) -> None:
    asked = Asked(whole=lambda number: number % 2 == 0)
    between = lambda _, verifier: Between(verifier, asked.before, asked.after)  # noqa: E731
    async with serving(versions, link, between=between) as router:
        asked.router = router
        await router.reload(str(versions.folder / "b"), running, 60.0)
        assert (await router.models())[0].arithmetic == versions.names["b"]
        await asked.check(versions)
        streamed, whole = [asked.answers[number] for number in (1, 3)], [asked.answers[number] for number in (0, 2)]
        # Of which something was told already.
        assert {told.arithmetic for told in streamed} == {versions.names["a"]}
        # Of which nothing was told; one that drafts well may have ended before.
        assert all(told.restarted == (told.arithmetic == versions.names["b"]) for told in whole)
        assert any(told.restarted for told in whole) == (running == "restart")
        for task in asked.late:
            versions.check(0, await task, "b")
        for number in range(len(ASKED)):
            versions.check(number, await answered(router, wanted(number)), "b")


@pytest.mark.exhaustive
@pytest.mark.parametrize("running", ["finish", "restart"])
@pytest.mark.parametrize("link", LINKS)
async def test_many_reloads_under_load(versions: Versions, link: str, running: RunningAnswers) -> None:
    async with serving(versions, link, link) as router:
        ended, named = False, list[str]()

        async def user(first: int) -> None:
            count = 0
            while not ended:
                number = (first + count) % COUNT
                answer = await answered(router, wanted(number, whole=(first + count) % 2 == 0))
                versions.check(number, answer)
                named.append(answer.arithmetic)
                count += 1

        users = [asyncio.create_task(user(number)) for number in range(12)]
        for version in "babab":
            await router.reload(str(versions.folder / version), running, 60.0)
            assert (await router.models())[0].arithmetic == versions.names[version]
            before = len(named)
            await until(lambda before=before: len(named) > before + len(users))
        ended = True
        await asyncio.gather(*users)
        # Streamed answers end with the weights that they have begun with.
        assert set(named) == set(versions.names.values())


async def test_the_prefix_cache_is_void(versions: Versions) -> None:
    request = replace(wanted(1), input=TEXT * 4)
    async with serving(versions, "in process") as router:
        await answered(router, request)
        assert (await answered(router, request)).cached > 0
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        again = await answered(router, request)
        assert again.cached == 0
        assert again.tokens == (await answered(router, replace(request, cache_salt="nobody's"))).tokens


async def refused(router: RouterService, versions: Versions, folder: str, error: type[OutriderError], **given: Any) -> None:
    """The reload is refused while an answer is under way, and neither it nor the next one is another."""
    told = Answered()
    task = asyncio.create_task(answered(router, wanted(2), told))
    await until(lambda: len(told.tokens) > 4)
    with refuses(error, **given):
        await router.reload(folder, "restart", 60.0)
    versions.check(2, await task, "a")
    versions.check(0, await answered(router, wanted(0)), "a")


async def test_a_version_that_does_not_fit_is_refused(versions: Versions) -> None:
    folder = versions.folder / "damaged"
    async with serving(versions, "in process") as router:
        for damage, do in DAMAGES.items():
            shutil.rmtree(folder, ignore_errors=True)
            other_weights(versions.folder / "a", folder)
            do(folder)
            error = InvalidArgument if damage == "a file that lies elsewhere" else ConfigurationError
            await refused(router, versions, str(folder), error)


async def test_a_folder_elsewhere_is_refused(versions: Versions, tiny_model: Path) -> None:
    async with serving(versions, "in process") as router:
        for folder in (str(tiny_model), str(versions.folder / "a" / ".." / ".." / "x"), "a", str(versions.folder / "none")):
            await refused(router, versions, folder, InvalidArgument, field="folder", value=folder)


async def test_without_allowed_folders_nothing_is_replaced(versions: Versions) -> None:
    async with pipeline(versions.folder / "a") as running:
        with refuses(ConfigurationError, "verifier.weights_from"):
            await running.router.reload(str(versions.folder / "b"), "finish", 60.0)


async def test_files_that_change_while_they_are_read_are_refused(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = versions.folder / "written"
    other_weights(versions.folder / "a", folder)
    digest = weights_digest

    def rewritten(of: Path) -> str:
        found = digest(of)
        (folder / FILE).touch()
        return found

    monkeypatch.setattr(new_weights, "weights_digest", rewritten)
    async with serving(versions, "in process") as router:
        await refused(router, versions, str(folder), ConfigurationError, says="changed")


async def test_without_memory_for_a_second_copy_nothing_is_loaded(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_weights, "free_memory", lambda: 1000.0)
    monkeypatch.delattr(new_weights, "load_beside")
    async with serving(versions, "in process") as router:
        await refused(router, versions, str(versions.folder / "b"), ConfigurationError, says="no room")


@pytest.mark.exhaustive
async def test_answers_that_do_not_end_in_time_go_on_with_the_old_weights(versions: Versions) -> None:
    asked = Asked(whole=lambda number: False)
    async with serving(versions, "in process", between=lambda _, verifier: Between(verifier, asked.before)) as router:
        asked.router = router
        with pytest.raises(Unavailable, match="under way still after"):
            await router.reload(str(versions.folder / "b"), "finish", 0.001)
        await asked.check(versions, "a")


@pytest.mark.parametrize(
    ("step", "takes_it"),
    [
        ("pause", False),
        ("replace", True),
        *(
            pytest.param(*each, marks=_SLOW)
            for each in (("read", False), ("read", True), ("pause", True), ("replace", False))
        ),
    ],
)
async def test_verifiers_change_together_or_not_at_all(versions: Versions, step: str, takes_it: bool) -> None:
    async def fail(now: str) -> None:
        if now == step:
            raise Unavailable("gone")

    def between(number: int, verifier: VerifierPort) -> Any:
        if number == 0:
            return verifier
        return Between(verifier, after=fail) if takes_it else Between(verifier, before=fail)

    async with serving(versions, "in process", "over gRPC", between=between) as router:
        with pytest.raises(Unavailable, match="gone"):
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        for card in (await router.service_state()).verifiers:
            assert card.arithmetic == versions.names["a"]
        for number in range(6):
            versions.check(number, await answered(router, wanted(number)), "a")


@pytest.mark.examples(2)
@pytest.mark.parametrize("lost", [1, 9])
async def test_new_weights_that_are_not_confirmed_are_told_again(
    versions: Versions, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloads, "_AGAIN_S", 0.01)
    times = iter(range(lost))

    async def lose(step: str) -> None:
        if step == "keep" and next(times, None) is not None:
            raise Unavailable("lost on the way")

    between = lambda number, verifier: Between(verifier, after=lose) if number else verifier  # noqa: E731
    async with serving(versions, "in process", "in process", between=between) as router:
        if lost == 1:
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        else:
            with pytest.raises(Unavailable, match="the new weights serve, but not at all verifiers: lost on the way"):
                await router.reload(str(versions.folder / "b"), "finish", 60.0)
        for number in range(4):
            versions.check(number, await answered(router, wanted(number)), "b")


@pytest.mark.exhaustive
async def test_two_verifiers_serve_the_new_weights(versions: Versions) -> None:
    async with serving(versions, "in process", "over gRPC") as router:
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        assert {card.arithmetic for card in (await router.service_state()).verifiers} == {versions.names["b"]}
        for number in range(6):
            versions.check(number, await answered(router, wanted(number)), "b")


async def test_a_reload_whose_next_step_does_not_come_is_undone(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline(versions.folder / "a", f"verifier.weights_from=['{versions.folder}']") as running:
        order = ReloadOrder(reload_id="lost", step="read", folder=str(versions.folder / "b"), within_s=10.0)
        await running.verifier.reload(order)
        await running.verifier.reload(replace(order, step="pause"))
        last = replace(order, step="replace")
        monkeypatch.setattr(reloading, "_NEXT_S", 0.1 - last.patience_s)
        await running.verifier.reload(last)
        waiting = asyncio.create_task(answered(running.router, wanted(0)))
        versions.check(0, await waiting, "a")
        with pytest.raises(Unavailable, match="no such reload"):
            await running.verifier.reload(replace(order, step="keep"))


async def test_one_reload_at_a_time(versions: Versions) -> None:
    async with serving(versions, "in process") as router:
        first = asyncio.create_task(router.reload(str(versions.folder / "b"), "finish", 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="being replaced already"):
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        await first


@pytest.mark.exhaustive
async def test_a_held_type_that_differs_is_refused(versions: Versions, tmp_path: Path) -> None:
    """A served model that keeps bfloat16 as it is stored takes no float32, but for one that holds float32 both are fine."""
    for version in ("a", "b"):
        shutil.copytree(versions.folder / version, tmp_path / version)
    as_halves(tmp_path / "a")
    allowed = f"verifier.weights_from=['{tmp_path}']"
    async with pipeline(tmp_path / "a", allowed, "verifier.weights=as_stored") as running:
        with refuses(ConfigurationError):
            await running.router.reload(str(tmp_path / "b"), "finish", 60.0)
    async with pipeline(tmp_path / "b", allowed, "verifier.weights=float32") as running:
        await running.router.reload(str(tmp_path / "a"), "finish", 60.0)
        got = await answered(running.router, wanted(0))
    async with pipeline(tmp_path / "a", "verifier.weights=float32") as running:
        assert got.tokens == (await answered(running.router, wanted(0))).tokens


async def test_an_answer_that_another_verifier_began_with_other_weights_is_not_gone_on_with(versions: Versions) -> None:
    asked: list[GenerationRequest] = []

    class Noting(Between):
        def generate(self, request: GenerationRequest) -> Any:
            asked.append(request)
            return super().generate(request)

    async with serving(versions, "in process", between=lambda _, verifier: Noting(verifier)) as router:
        begun = await answered(router, wanted(0))
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        await answered(router, wanted(0))
        moved = replace(asked[0], committed=tuple(begun.tokens[:4]), arithmetic=begun.arithmetic)
        with pytest.raises(Unavailable, match="other weights"):
            await anext(router._verifier.generate(moved))


def as_halves(folder: Path) -> None:
    """Let the weights be stored in bfloat16."""
    write(folder, {name: weight.bfloat16() for name, weight in load_file(folder / FILE).items()})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("dense", ("verifier.kernels=onednn",)),
        ("dense", ("verifier.kernels=torch",)),
        ("dense", ("verifier.dtype=int8",)),
        ("dense", ("verifier.dtype=bfloat16",)),
        ("tied", ()),
        ("halves", ("verifier.weights=as_stored",)),
        ("halves", ("verifier.weights=float32",)),
        ("mixture", ()),
        ("mixture", ("verifier.kernels=onednn",)),
    ],
)
async def test_weights_of_every_form_are_replaced(
    tiny_model: Path, tmp_path: Path, form: str, flags: tuple[str, ...]
) -> None:
    first = tmp_path / "a"
    if form == "mixture":
        make_mixture(tiny_model, first)
    elif form == "tied":
        make_tiny_model(first, tie_word_embeddings=True)
    else:
        shutil.copytree(tiny_model, first)
    other_weights(first, tmp_path / "b")
    if form == "halves":
        as_halves(first)
        as_halves(tmp_path / "b")
    async with pipeline(tmp_path / "b", *flags) as running:
        new = await answered(running.router, wanted(1))
    async with pipeline(first, f"verifier.weights_from=['{tmp_path}']", *flags) as running:
        old = await answered(running.router, wanted(1))
        assert old.tokens != new.tokens
        for folder, expected in ((tmp_path / "b", new), (first, old), (tmp_path / "b", new)):
            await running.router.reload(str(folder), "finish", 60.0)
            again = await answered(running.router, replace(wanted(1), strategy="autoregressive"))
            assert (again.tokens, again.arithmetic) == (expected.tokens, expected.arithmetic)


@pytest.mark.parametrize(
    ("field", "value"), [("stages", 2), ("tensor_parallel_size", 2), ("device", "cuda:0")], ids=lambda value: str(value)
)
def test_what_is_not_replaced_so_far_is_refused_by_name(field: str, value: object) -> None:
    config = replace(TargetConfig(model_path="/model"), **{field: value})  # type: ignore[arg-type]
    with refuses(ConfigurationError, field=f"verifier.{field}", value=value):
        check_supported(config)


@pytest.mark.exhaustive
async def test_a_verifier_takes_the_weights_of_another_one(versions: Versions) -> None:
    flag = f"verifier.weights_from=['{versions.folder}']"
    async with pipeline(versions.folder / "a", flag) as first, pipeline(versions.folder / "a", flag) as second:
        assert await first.verifier.replaced_weights() == ("", "")
        order = ReloadOrder(reload_id="r", step="read", folder=str(versions.folder / "b"), within_s=10.0)
        await first.verifier.reload(order)
        asked = asyncio.create_task(first.verifier.replaced_weights())
        for step in ("pause", "replace", "keep"):
            await asyncio.sleep(0.01)
            assert not asked.done()
            await first.verifier.reload(replace(order, step=step))
        folder, digest = await asked
        assert folder == str((versions.folder / "b").resolve())
        with pytest.raises(ConfigurationError, match="are not those that the other verifiers have read"):
            await second.verifier.take_weights(folder, "another")
        versions.check(0, await answered(second.router, wanted(0)), "a")
        await second.verifier.take_weights(folder, digest)
        versions.check(0, await answered(second.router, wanted(0)), "b")
