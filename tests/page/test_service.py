"""The page in a real browser, in front of a router that does what it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.privacy.config import Privacy
from services.privacy.even_router import EvenRouter
from speculation.errors import Unavailable
from speculation.messages import DecodingCounts, ServiceState, VerifierCard
from tests.page.asking import answer_of, ask, scripted_service, send
from tests.page.conftest import Complaints, Open, Serve
from tests.servers.scripted_router import ScriptedRouter

pytestmark = [pytest.mark.xdist_group("page")]

KEY = "k" * 20
SCRIPT = "<script>document.title = 'gotcha'</script><img src=x onerror=\"document.title='gotcha'\"> &amp; done"


def card(**changes: object) -> VerifierCard:
    usual = VerifierCard(
        model="scripted", max_model_len=9, vocab_size=9, running=0, waiting=0, free_blocks=3, total_blocks=4, bit_exact=True,
        counts=DecodingCounts(
            tokens=300, passes=100, drafted_by_source={"suffix": 400, "recycling": 100},
            accepted_by_source={"suffix": 190, "recycling": 10}, saved_s=12.34,
        ),
        drafters={"the drafter": True},
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


def scripted(text: str = "words") -> ScriptedRouter:
    router = ScriptedRouter(text)
    router.state = ServiceState(verifiers=(card(),), components={"verifier": {"running": 1}, "drafter": {"running": 1}})
    return router


def until(what: Callable[[], bool]) -> None:
    """Wait for it."""
    ends = time.monotonic() + 20
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_markup_in_an_answer_and_in_a_question_stays_text(open_page: Open, serve: Serve) -> None:
    url = serve(scripted(SCRIPT))
    page = open_page(url)
    ask(page, SCRIPT)
    assert answer_of(page) == SCRIPT
    assert page.locator(".user").evaluate("each => each.textContent") == SCRIPT
    assert page.locator("#turns script, #turns img").count() == 0
    assert page.title() == "Outrider"


def test_stop_ends_the_request_and_keeps_what_came(open_page: Open, serve: Serve) -> None:
    router = scripted("and so on ")
    router.forever, router.waits = True, 0.005
    url = serve(router)
    page = open_page(url)
    send(page, "count", length="")
    page.get_by_text("and so on and so on").wait_for()
    assert page.inner_text("#send") == "Stop"
    page.click("#send")
    until(lambda: router.left == 1)
    page.get_by_text("stopped").wait_for()
    kept = answer_of(page)
    assert kept.startswith("and so on") and page.inner_text("#send") == "Send"
    # The next question builds on it.
    router.forever, router.waits, router.text = False, 0.0, "the end"
    ask(page, "go on")
    assert answer_of(page) == "the end" and router.left == 1


@pytest.mark.parametrize("width", [1280, 420])
def test_the_end_of_a_long_answer_is_in_sight(open_page: Open, serve: Serve, width: int) -> None:
    page = open_page(serve(scripted("one more line\n" * 80)), width=width)
    ask(page, "count", length="")
    below = """() => {
        const composer = document.querySelector('#composer'), sticky = getComputedStyle(composer).position === 'sticky';
        const sight = sticky ? composer.getBoundingClientRect().top : innerHeight;
        return document.querySelector('.under').getBoundingClientRect().bottom - sight;
    }"""
    assert page.evaluate(below) <= 0


@pytest.mark.exhaustive
def test_a_new_chat_stops_the_answer_of_the_old_one(open_page: Open, serve: Serve) -> None:
    router = scripted("and so on ")
    router.forever, router.waits = True, 0.005
    url = serve(router)
    page = open_page(url)
    send(page, "count", length="")
    page.get_by_text("and so on and so on").wait_for()
    page.click("#new")
    until(lambda: router.left == 1)
    assert page.locator(".answer").count() == 0 and page.inner_text("#send") == "Send"


@pytest.mark.exhaustive
def test_an_error_in_the_middle_of_an_answer_is_shown(open_page: Open, serve: Serve) -> None:
    router = scripted("half of it")
    router.fails = (4, Unavailable("the verifier is gone"))
    url = serve(router)
    page = open_page(url)
    ask(page, "tell")
    assert answer_of(page) == "half"
    assert page.get_by_role("alert").inner_text() == "the verifier is gone"


def test_a_refused_value_is_named(open_page: Open, serve: Serve, complaints: Complaints) -> None:
    complaints.expected = "status of 400"
    router = scripted()
    url = serve(router)
    page = open_page(url)
    page.locator("#composer").evaluate("form => { form.noValidate = true; }")
    send(page, "tell", temperature="3")
    assert page.locator(".card.failure").inner_text().startswith("temperature is 3")
    assert page.locator(".answer").count() == 0 and page.locator("#figures-card").is_hidden()
    # It is sent once more, and not twice.
    assert page.input_value("#message") == "tell"
    ask(page, "tell it")
    assert bytes(router.asked[-1].input).decode().count("tell") == 1


def test_a_wrong_key_asks_for_another_one(open_page: Open, serve: Serve, complaints: Complaints) -> None:
    complaints.expected = "status of 401"
    public = PublicServerConfig(port=0, api_key_hashes=(hash_key(KEY),))
    url = serve(scripted(), HttpConfig(port=0, public=public))
    page = open_page(url)
    page.locator("#key-dialog[open]").wait_for()
    page.fill("#key", "not this one at all")
    page.press("#key", "Enter")
    page.get_by_text("That key was refused").wait_for()
    assert page.input_value("#key") == ""
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    ask(page, "hello")
    assert answer_of(page) == "words"
    kept = page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
    assert kept == ["", 0, 0]
    # Figures of all requests are for keys that may see them.
    page.get_by_text("need the scope observe").wait_for()
    page.reload()
    page.locator("#key-dialog[open]").wait_for()
    page.click("#key-cancel")
    page.get_by_text("only with an API key").wait_for()
    # What the page is for stays to be read.
    assert page.locator(".welcome").is_visible()
    page.fill("#message", "hello again")
    page.press("#message", "Enter")
    page.locator("#key-dialog[open]").wait_for()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.locator(".answer .under").wait_for()
    assert answer_of(page) == "words" and page.locator("#strategy option").count() == 2


def test_a_private_server_is_a_chat_without_colours(open_page: Open, serve: Serve, complaints: Complaints) -> None:
    complaints.expected = "status of 400"
    privacy = Privacy(mode="strict", interval_s=0.05)
    config = HttpConfig(port=0, public=PublicServerConfig(port=0, privacy=privacy))
    url = serve(EvenRouter(scripted("a private answer"), privacy), config)
    page = open_page(url)
    ask(page, "tell")
    assert answer_of(page) == "a private answer"
    assert page.locator(".token.drafted").count() == 0 and page.locator("#pass-card").is_hidden()
    assert "does not tell who guessed the tokens" in page.inner_text("#hint")
    assert page.inner_text("#tokens") == "16"
    ask(page, "again")


def test_the_live_state_is_shown(open_page: Open, serve: Serve) -> None:
    router = scripted()
    second = card(running=2, waiting=1, drafters={"the drafter": False}, free_blocks=1)
    router.state = ServiceState(
        verifiers=(card(), second), components={"verifier": {"running": 2}, "drafter": {"running": 2, "starting": 1}}
    )
    url = serve(router)
    page = open_page(url)
    page.locator("#live-card").wait_for()
    assert page.inner_text("#live-load") == "2 requests running, 1 waiting"
    assert page.locator("#parts li").all_inner_texts() == [
        "2 verifiers running", "2 drafters running", "1 drafter starting", "the drafter connected to 1 of 2 verifiers"
    ]  # fmt: skip
    assert page.locator("#parts li").evaluate_all("all => all.map(each => each.className)") == [
        "good", "good", "warn", "warn"
    ]  # fmt: skip
    assert page.locator("#live-bars .said").all_inner_texts() == [
        "50 %", "25 %, 0 running, 0 waiting", "75 %, 2 running, 1 waiting", "48 % of 800 guesses kept",
        "10 % of 200 guesses kept",
    ]  # fmt: skip
    assert page.inner_text("#live-note") == "3.00 tokens per pass over all answers; drafting saved 24.7 s."
    assert page.inner_text("#health") == "2 verifiers ready"


@pytest.mark.exhaustive
def test_a_verifier_that_dies_is_seen_and_so_is_the_next_one(open_page: Open, serve: Serve) -> None:
    router = scripted()
    url = serve(router)
    page = open_page(url)
    page.locator("#health.good").wait_for()
    router.state = ServiceState(components={"verifier": {"starting": 1}, "drafter": {"running": 1}})
    page.locator("#health.bad").wait_for()
    assert page.inner_text("#health") == "no verifier answers"
    assert page.locator("#parts li.warn").inner_text() == "1 verifier starting"
    router.state = scripted().state
    page.locator("#health.good").wait_for()


@pytest.mark.exhaustive
def test_a_server_that_is_gone_is_said_and_comes_back(open_page: Open, complaints: Complaints) -> None:
    complaints.expected = "ERR_CONNECTION_REFUSED"
    with scripted_service(scripted()) as url:
        port = int(url.rpartition(":")[2])
        page = open_page(url)
        page.locator("#health.good").wait_for()
    page.locator("#health.bad").wait_for()
    page.fill("#message", "anybody?")
    page.click("#send")
    assert page.locator(".card.failure").inner_text() == "The server does not answer."
    assert page.input_value("#message") == "anybody?"
    with scripted_service(scripted(), HttpConfig(port=port)):
        page.locator("#health.good").wait_for()


@pytest.mark.exhaustive
def test_a_page_that_found_no_server_learns_of_one(open_page: Open, serve: Serve, complaints: Complaints) -> None:
    complaints.expected = "ERR_CONNECTION_REFUSED"
    page = open_page(serve(scripted()))
    page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    page.reload()
    page.get_by_text("The server does not answer.").last.wait_for()
    assert page.locator(".welcome").is_visible() and page.locator("#strategy option").count() == 0
    page.unroute("**/v1/**")
    page.locator("#health.good").wait_for()
    page.locator("#strategy option").first.wait_for(state="attached")
    page.locator(".card.failure").wait_for(state="detached")
    # Whoever wants to ask from a program is led there.
    assert page.locator("#api").get_attribute("href") == "/docs"


@pytest.mark.exhaustive
def test_the_page_is_off_where_the_settings_say_so(open_page: Open, serve: Serve, complaints: Complaints) -> None:
    complaints.expected = "status of 404"
    url = serve(scripted(), HttpConfig(port=0, page=False))
    page = open_page(url)
    assert "unknown_url" in page.content() and page.locator("#composer").count() == 0
