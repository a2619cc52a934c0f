"""All forms of calls that are read, and the marks between which models think."""

from __future__ import annotations

from collections.abc import Callable

from services.tool_formats import harmony
from services.tool_formats.harmony import NAME as HARMONY
from services.tool_formats.interface import ToolFormat
from services.tool_formats.json_calls import JsonCalls, NewId, long_id, short_id
from services.tool_formats.marks import Marks
from services.tool_formats.named_arguments import NamedArguments
from services.tool_formats.pythonic import PythonCalls
from services.tool_formats.sectioned import SectionedCalls
from services.tool_formats.tagged import FunctionTags, KeyTags

_TOOL_CALL = ("<tool_call>", "</tool_call>")
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>")
# By name: what begins a thought, and what ends it. In harmony it is a message.
THOUGHTS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "bracketed_think": ("[THINK]", "[/THINK]"),
    "seed_think": ("<seed:think>", "</seed:think>"),
    "start_thinking": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "start_think": ("<|think_start|>", "<|think_end|>"),
    "diamond_think": ("◁think▷", "◁/think▷"),
    harmony.NAME: (harmony.CHANNEL + "analysis" + harmony.MESSAGE, harmony.END),
}


def _json(name: str, *marks: str) -> Callable[[Marks], ToolFormat]:
    return lambda mark: JsonCalls(name, *map(mark, marks))


def _listed(name: str, *marks: str, call_id: NewId = long_id) -> Callable[[Marks], ToolFormat]:
    return lambda mark: JsonCalls(name, *map(mark, marks), listed=True, call_id=call_id)


def _sectioned(
    name: str, pairs: tuple[tuple[str, str], tuple[str, str]], middle: str, head: str
) -> Callable[[Marks], ToolFormat]:
    def made(mark: Marks) -> ToolFormat:
        section, call = ((mark(begin), mark(end)) for begin, end in pairs)
        return SectionedCalls(name, section, call, mark(middle), head)  # type: ignore[arg-type]

    return made


# By name. Of two that read the same call, the first one counts.
FORMATS: dict[str, Callable[[Marks], ToolFormat]] = {
    "hermes": _json("hermes", *_TOOL_CALL),
    "function_tags": lambda mark: FunctionTags(*map(mark, _TOOL_CALL)),
    "key_tags": lambda mark: KeyTags(*map(mark, (*_TOOL_CALL, *_KEY, *_VALUE))),
    "mistral": _listed("mistral", "[TOOL_CALLS]", call_id=short_id),
    "mistral_args": lambda mark: NamedArguments("mistral_args", *map(mark, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))),
    "deepseek_v3": _sectioned("deepseek_v3", _DEEPSEEK, "<｜tool▁sep｜>", "kind"),
    "deepseek_v31": _sectioned("deepseek_v31", _DEEPSEEK, "<｜tool▁sep｜>", "name"),
    "kimi_k2": _sectioned("kimi_k2", _KIMI, "<|tool_call_argument_begin|>", "id"),
    # Its mark ends nothing, so that it reads the next form, too, but for its end.
    "granite": _listed("granite", "<|tool_call|>"),
    "phi4": _listed("phi4", "<|tool_call|>", "<|/tool_call|>"),
    "listed_tags": _listed("listed_tags", "<tool_calls>", "</tool_calls>"),
    "python_marked": lambda mark: PythonCalls("python_marked", mark("<|tool_call_start|>"), mark("<|tool_call_end|>")),
    "llama_json": lambda mark: JsonCalls("llama_json", mark("<|python_tag|>"), bare=True),
    "pythonic": lambda mark: PythonCalls("pythonic"),
}
# All names: harmony's messages are read by ``answer_text`` itself.
NAMES = (*FORMATS, HARMONY)
