"""The page in a real browser, in front of a whole service: what it shows of an answer is the answer, and how it was made."""

from __future__ import annotations

import pytest

from tests.page.asking import answer_of, ask, kinds, saved, whole_answer
from tests.page.conftest import Open
from tests.servers.http_service import HttpService

pytestmark = [pytest.mark.xdist_group("page")]

MESSAGE = "one two three one two three one two three one two"


@pytest.mark.examples(3)
@pytest.mark.parametrize(("strategy", "temperature"), [("autoregressive", 0.0), ("blend", 0.0), ("suffix", 1.0)])
def test_it_shows_the_answer_as_it_is_without_a_page(
    open_page: Open, service: HttpService, strategy: str, temperature: float
) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, strategy=strategy, seed="7", temperature=str(temperature))
    whole = whole_answer(service.url, MESSAGE, seed=7, temperature=temperature, max_tokens=48)
    assert answer_of(page) == whole["choices"][0]["message"]["content"]
    assert page.locator(".token").evaluate_all("all => all.map(each => each.textContent).join('')") == answer_of(page)
    tokens = whole["usage"]["completion_tokens"]
    assert page.locator(".token").count() == tokens == int(page.inner_text("#tokens"))
    assert "seed 7" in page.inner_text(".under")


def test_coloured_tokens_are_those_that_were_guessed(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, strategy="blend")
    metrics = saved(page)["metrics"]["speculative_decoding"]
    guessed = page.locator(".token.drafted")
    assert guessed.count() == metrics["num_accepted_draft_tokens"] > 0
    for source, number in metrics["accepted_by_source"].items():
        assert page.locator(f".token.drafted[data-source={source}]").count() == number
        assert page.locator(f"#legend [data-source={source}] b").inner_text() == str(number)
    colours = guessed.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)")
    own = page.locator(".token[data-source=target]").first.evaluate("each => getComputedStyle(each).backgroundColor")
    assert own == "rgba(0, 0, 0, 0)" and own not in colours
    assert int(page.inner_text("#passes")) == metrics["num_spec_steps"]
    assert float(page.inner_text("#per-pass")) == pytest.approx(metrics["mean_acceptance_length"], abs=0.006)


def test_the_kept_path_of_each_pass_is_what_comes_next_in_the_answer(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, strategy="blend")
    run = saved(page)
    assert len(run["passes"]) == int(page.inner_text("#passes")) > 1
    at = dropped = cut = 0
    for index, one in enumerate(run["passes"]):
        page.locator("#slider").fill(str(index))
        page.get_by_text(f"Pass {index + 1} of {len(run['passes'])}", exact=True).wait_for()
        assert kinds(page, "kept") == [token["id"] for token in run["tokens"][at : at + one["committed"]]]
        assert sorted(kinds(page, "dropped")) == sorted(
            token for node, token in enumerate(one["tokens"]) if node not in one["accepted"]
        )
        at += one["committed"]
        dropped, cut = dropped + len(kinds(page, "dropped")), cut + len(kinds(page, "cut"))
        assert page.locator(".pass.selected").get_attribute("data-pass") == str(index)
    assert at == len(run["tokens"]) and dropped > 0
    assert cut == sum(min(40, len(one["dropped"]["tokens"])) for one in run["passes"])


@pytest.mark.examples(3)
@pytest.mark.parametrize("effort", ["", "paper", "measured"])
def test_the_effort_is_asked_for_and_saved(open_page: Open, service: HttpService, effort: str) -> None:
    page = open_page(service.url)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, MESSAGE, strategy="suffix", effort=effort, length="8")
    assert asked.value.post_data_json["speculation"].get("effort", "") == effort
    run = saved(page)
    assert run["effort"] == effort
    whole = whole_answer(service.url, MESSAGE, temperature=0, max_tokens=8)
    assert answer_of(page) == whole["choices"][0]["message"]["content"]


def test_a_conversation_goes_on(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, "one two", length="8")
    ask(page, "three four", length="8")
    assert page.locator(".answer").count() == page.locator(".user").count() == 2
    run = saved(page)
    assert [message["role"] for message in run["messages"]] == ["user", "assistant", "user"]
    assert run["messages"][1]["content"] == answer_of(page, 0)
    page.locator(".answer .under button").first.click()
    assert saved(page)["text"] == answer_of(page, 0)
    page.click("#new")
    assert page.locator(".answer").count() == 0 and page.locator("#save").is_disabled()


def test_the_time_and_what_other_strategies_would_have_taken(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, strategy="suffix")
    run = saved(page)
    parts = page.locator("#time-legend li").all_inner_texts()
    assert any("the model's passes" in part for part in parts)
    # Each part is shown to two digits or three.
    assert sum(seconds_in(part) for part in parts) == pytest.approx(run["metrics"]["total_s"], rel=0.02, abs=0.01)
    others = run["metrics"]["speculative_decoding"]["comparisons"]
    assert {each["strategy"] for each in others} == {"autoregressive", "prompt_lookup", "recycling"}
    told = dict(
        zip(
            *(page.locator(f"#comparisons > {each}").all_inner_texts() for each in (":nth-child(3n+1)", ".said")),
            strict=True,
        )
    )
    assert told["autoregressive"].startswith(f"{len(run['tokens'])} passes")
    assert told["suffix, this one"].startswith(f"{len(run['passes'])} passes")


def seconds_in(part: str) -> float:
    number, unit = part.split()[-2:]
    return float(number) / (1000 if unit == "ms" else 1)


@pytest.mark.exhaustive
def test_it_works_by_keyboard_alone(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    page.locator("#strategy option[value=blend]").wait_for(state="attached")
    page.select_option("#strategy", "blend")
    page.focus("#message")
    page.keyboard.type(MESSAGE)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.locator(".under").wait_for()
    assert page.locator(".user").inner_text() == f"{MESSAGE}\none"
    page.focus("#slider")
    page.keyboard.press("Home")
    assert page.inner_text("#pass-title").startswith("Pass 1 of ")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#pass-title").startswith("Pass 2 of ")
    assert page.locator("#slider").get_attribute("aria-valuetext").startswith("Pass 2 of ")
    # An example's button is gone once it is sent: the focus is where the answer is stopped.
    page.click("#new")
    page.locator(".welcome button").last.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "send"
    page.locator(".under").wait_for()
    page.focus("#slider")
    outline = page.locator("#slider").evaluate("each => getComputedStyle(each).outlineStyle")
    assert outline != "none"


@pytest.mark.exhaustive
def test_what_is_shown_has_a_name_for_those_who_hear_it(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, strategy="blend")
    # The answer itself first, then how it was made.
    told = page.locator("#told").text_content()
    assert told.startswith(f"{answer_of(page).strip()} The answer has ")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, [role=img], dialog, [tabindex]')].filter(each =>"
        " !each.textContent.trim() && !each.labels?.length && !each.getAttribute('aria-label') && !each.hidden"
        " && !each.getAttribute('aria-labelledby')).map(each => each.outerHTML.slice(0, 80))"
    )
    assert unnamed == []


@pytest.mark.parametrize("width", [420, pytest.param(320, marks=pytest.mark.exhaustive)])
def test_a_phone_needs_no_sideways_scrolling(open_page: Open, service: HttpService, width: int) -> None:
    page = open_page(service.url, width=width, height=800)

    def surplus() -> int:
        return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    assert surplus() == 0
    ask(page, MESSAGE + " " + "x" * 200, strategy="blend")
    assert page.locator("#tree svg").is_visible() and surplus() == 0
    # What the colours mean stands at the answer, since all else is further down.
    legend = page.locator(".under .legend")
    assert legend.is_visible() and legend.inner_text() == page.inner_text("#legend")


def test_nothing_is_loaded_from_elsewhere(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, MESSAGE, length="8")
    loaded = page.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded and all(name.startswith(service.url) for name in loaded)
    assert {name.removeprefix(service.url) for name in loaded} == {
        "/v1/models", "/v1/outrider/status", "/v1/chat/completions"
    }  # fmt: skip
