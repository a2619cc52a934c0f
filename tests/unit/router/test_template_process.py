"""A chat template that fails, loops or swells costs its request alone, in seconds and megabytes, and says why."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest

from services.api.messages import ChatMessage
from services.router import template_process
from services.router.templates import ChatTemplate
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError, InvalidArgument, ResourceExhausted
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content | int(base=99) }}{{ [] | first + 1 }}", ""),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in 3 %}{% endfor %}", "TypeError"),
        ("{{ range(10**6) }}", "OverflowError"),
        ("{{ dict(1) }}", "TypeError"),
        ("{{ messages | map('nosuch') | list }}", "nosuch"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now(1) }}", "TypeError"),
        ("{{ messages[0].content.encode('nosuch') }}", "LookupError"),
        ("{{ '\\ud800' | tojson }}{{ messages[0].content.index('x') }}", "ValueError"),
    ],
)
def test_whatever_a_template_raises_is_a_template_error(source: str, said: str) -> None:
    with pytest.raises(jinja2.TemplateError) as caught:
        render(source)
    assert said in str(caught.value)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{%% set ns = namespace(x='0123456789abcdef') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x | length }}"
NESTED = "{%% set ns = namespace(x=[1], y=[1]) %%}{%% for i in range(60) %%}{%% set ns.x = [ns.x, ns.x] %%}{%% set ns.y = [ns.y, ns.y] %%}{%% endfor %%}%s"


@pytest.mark.examples(20)
@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        LOOP.replace("999) %}{% endfor", "999) if j < 0 %}{% endfor"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in [[0, 0, 0]] * 60 recursive %}{% if loop.depth0 < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | list | sort | join %}{% endfor %}",
        GROWING % "{% set ns.x = ns.x ~ ns.x %}",
        GROWING % "{% set ns.x = ns.x + ns.x %}",
        GROWING % "{% set ns.x = ns.x * 2 %}",
        GROWING % "{% set ns.x = [ns.x, ns.x] | join %}",
        GROWING % "{% set ns.x = ''.join([ns.x, ns.x]) %}",
        GROWING % "{% set ns.x = ns.x.replace('0', ns.x) %}",
        GROWING % "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        GROWING % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
        GROWING % "{% set ns.x = ns.x.translate({48: ns.x}) %}",
        GROWING % "{% set ns.x = ns.x | indent(ns.x | length, true) %}",
        GROWING % "{% set ns.x = (ns.x ~ '\t\t').expandtabs(ns.x | length) %}",
        NESTED % "{{ ns.x | tojson }}", NESTED % "{{ ns.x }}", NESTED % "{{ ns.x ~ 1 }}", NESTED % "{{ ns.x == ns.y }}",
        NESTED % "{{ ns.x < ns.y }}", NESTED % "{{ ns.x | string }}", NESTED % "{{ '%s' % [ns.x] }}",
        "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
        "{% set n = 10 ** 9 %}{{ 10 ** n }}", "{{ 'a' * 10 ** 9 }}", "{{ 10 ** 9 * [1] }}", "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}", "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10 ** 9, 1) }}", "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}", "{{ [1] | tojson(indent=10 ** 9) }}", "{{ 'a\tb'.expandtabs(10 ** 9) }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "{{ (5).to_bytes(10 ** 9, 'big') }}", "{{ lipsum(10 ** 7) }}",
        "{{ (['a' * 10 ** 6] * 1000) | join }}",
    ],
)  # fmt: skip
def test_a_template_that_loops_or_swells_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with monkeypatch.context() as limits:
        limits.setattr(template_process, "MOST_SECONDS", 1.0)
        with pytest.raises(
            jinja2.TemplateError, match=r"takes more than 1 seconds|MiB of memory|too long|by the memory|OverflowError"
        ):
            render(source)
    assert time.monotonic() - began < 20
    # Within the usual limit: to start another process may take a busy machine a second.
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}", "1/1True"),
        ("{{ 1700000000 | string }}{{ [1700000000] | tojson }}{{ namespace(n=10 ** 9).n }}{{ 10 ** 9 | abs }}", "1700000000[1700000000]1000000000" + "1000000000"),
        ("{% macro f(n) %}{{ n + 1 }}{% endmacro %}{{ f(10 ** 9) }}{{ [3, 1] | sort | join('-') }}", "10000000011-3"),
        ("{% for m in [] %}x{% else %}none{% endfor %}{% for m in nothing %}x{% endfor %}", "none"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b ~ none ~ 2.5 }}{% endfor %}", "x1None2.5"),
        ("{% for i in [1, [2, [3]]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}", "123"),
        ("{% for i in range(9) if i % 2 %}{{ i }}{{ loop.previtem | default('-') }}{% endfor %}", "1-315375"),
        ("{{ ('<' ~ 'b>' | e) ~ '%s-%03d' % ('a', 7) }}{{ 'a,b'.split(',') | join('+') }}", "<b&gt;a-007a+b"),
        ("{{ '{:>5}{n}'.format('x', n=1) }}{{ 2 ** 10 }}{{ [1] * 3 }}{{ 'ab' * 2 }}{{ messages[0].content.upper() }}", "    x11024[1, 1, 1]ababHI"),
        ("{% macro f(n) %}[{{ n }}{{ caller() }}]{% endmacro %}{% call f(1) %}x{% endcall %}", "[1x]"),
        ("{{ messages | map(attribute='role') | list | tojson }}{{ 'x' | indent(2, first=true) }}", '["user"]  x'),
    ],
)  # fmt: skip
def test_what_keeps_the_bounds_is_not_changed(source: str, text: str) -> None:
    assert render(source) == text


def test_renderings_side_by_side_have_a_clock_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MOST_SECONDS", 1.0)
    template = ChatTemplate(
        "{% for i in range(messages[0].content | int) %}{% for j in range(999) %}{% endfor %}{% endfor %}x", {}
    )
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(template.render, [{"role": "user", "content": "99999"}])
        assert [*pool.map(template.render, [[{"role": "user", "content": "1"}]] * 20)] == ["x"] * 20
        with pytest.raises(jinja2.TemplateError, match="seconds"):
            slow.result()


def test_a_process_that_starts_slowly_costs_no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", "import time; time.sleep(1.2)\n" + template_process._PROGRAM)
    monkeypatch.setattr(template_process, "MOST_SECONDS", 1.0)
    processes = template_process.TemplateProcesses()
    assert processes.render("{{ messages[0].content }}", {"messages": MESSAGES}) == "hi"


def waiting(seconds: float) -> str:
    """The program of a process that waits so long before each rendering, as for a processor that others have."""
    patched = f"""import time
from services.router import template_program as program
rendered = program.rendered
program.rendered = lambda *given: [time.sleep({seconds}), rendered(*given)][1]
serve("""
    return template_process._PROGRAM.replace("serve(", patched, 1)


def test_a_busy_machine_costs_no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", waiting(1.2))
    monkeypatch.setattr(template_process, "MOST_SECONDS", 1.0)
    processes = template_process.TemplateProcesses()
    for _ in range(2):
        assert processes.render("{{ messages[0].content }}", {"messages": MESSAGES}) == "hi"
    with pytest.raises(template_process.StoppedRendering, match="1 seconds of the processor"):
        processes.render(LOOP, {})


def test_a_machine_without_time_for_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", waiting(60.0))
    monkeypatch.setattr(template_process, "_WAIT_S", 2.0)
    with pytest.raises(ResourceExhausted, match="too busy"):
        template_process.TemplateProcesses().render("", {})


def test_a_process_that_never_starts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", "import time; time.sleep(60)\n" + template_process._PROGRAM)
    monkeypatch.setattr(template_process, "_START_S", 0.3)
    with pytest.raises(ResourceExhausted, match="chat template"):
        template_process.TemplateProcesses().variables("")


def test_nothing_is_learnt_from_a_rendering_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "{% for i in range(9999) %}{% for j in range(999) %}{% endfor %}{% endfor %}{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    template = ChatTemplate(slow, {})
    with monkeypatch.context() as busy:
        busy.setattr(template_process, "MOST_SECONDS", 0.05)
        with pytest.raises(jinja2.TemplateError, match="seconds"):
            template.render(MESSAGES)
    assert template.render(MESSAGES) == "hi"


def test_the_request_is_told(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content.index('a') }}{{ messages[0].content }}")
    tokens = Tokens(str(tmp_path))
    assert tokens.encode_chat((ChatMessage(role="user", content="a"),))
    with refuses(
        InvalidArgument,
        field="messages",
        value="a conversation",
        allowed="what the chat template allows: ValueError: substring not found",
    ) as caught:
        tokens.encode_chat((ChatMessage(role="user", content="b"),))
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nosuch }}", "{{ " + "(" * 500 + ")" * 500 + " }}", "{% break %}"])
@pytest.mark.parametrize("own_class", [True, False])
def test_a_template_that_is_none_is_refused_at_start(tmp_path: Path, source: str, own_class: bool) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    if not own_class:
        # What only transformers knows how to read.
        file = tmp_path / "tokenizer_config.json"
        file.write_text(file.read_text().replace("{", '{"split_special_tokens": true,', 1))
    with refuses(ConfigurationError, says="chat template") as caught:
        Tokens(str(tmp_path))
    assert "\n" not in str(caught.value)
