"""Small chat templates of our own, built as those of the kinds of models that are known: turns, tools, calls, thoughts."""

from __future__ import annotations

# In place of a newline, which a template's own lines do not keep.
_TURN = "{{ '<|' + m.role + '|>' }}"
_CLOSED = "<|closed|>"
_BEGUN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}"
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_OBJECT = '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}"


def _turns(calls: str, before: str = "", between: str = "", after: str = "", begun: str = _BEGUN) -> str:
    """A template whose assistant writes each of its calls as ``calls``."""
    loop = "{% for c in m.tool_calls %}" + calls + ("{% if not loop.last %}" + between + "{% endif %}" if between else "")
    called = "{% if m.tool_calls %}" + before + loop + "{% endfor %}" + after + "{% endif %}"
    return _TOOLS + "{% for m in messages %}" + _TURN + "{{ m.content }}" + called + _CLOSED + "{% endfor %}" + begun


_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_EACH = "{% for k, v in c.function.arguments.items() %}"
_VALUE = "{{ v if v is string or v is boolean or v is number else (v | tojson) }}"
_HARMONY = (
    _TOOLS
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    + "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    + "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    + "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    + "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# By the form of calls that each is to be found to have.
BY_FORM: dict[str, str] = {
    "hermes": _turns(f"\n<tool_call>\n{_OBJECT}\n</tool_call>"),
    "function_tags": _turns(
        "\n<tool_call>\n<function={{ c.function.name }}>\n"
        + _EACH
        + "<parameter={{ k }}>\n"
        + _VALUE
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "key_tags": _turns(
        "\n<tool_call>{{ c.function.name }}\n"
        + _EACH
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else (v | tojson) }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "mistral": _turns(
        "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
        + _OBJECT[:-1]
        + ', "id": "{{ c.id }}"}',
        "[TOOL_CALLS] [",
        ", ",
        "]",
    ),
    "mistral_args": _turns(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}"),
    "deepseek_v3": _turns(
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>" + _NAME + "\n```json\n" + _ARGUMENTS + "\n```<｜tool▁call▁end｜>",
        _SECTION[0],
        "\n",
        _SECTION[1],
    ),
    # It adds the arguments to a text, as this model's own does.
    "deepseek_v31": _turns(
        "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}",
        _SECTION[0],
        "",
        _SECTION[1],
    ),
    "kimi_k2": _turns(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + _ARGUMENTS + "<|tool_call_end|>",
        _KIMI[0],
        "",
        _KIMI[1],
    ),
    "phi4": _turns(_OBJECT, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "granite": _turns(_OBJECT, "<|tool_call|>[", ", ", "]"),
    "listed_tags": _turns(_OBJECT, "<tool_calls>[", ",", "]</tool_calls>"),
    "python_marked": _turns(
        "{{ c.function.name }}(" + _EACH + "{{ k }}={{ v | tojson if v is string else v }}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
    ),
    "llama_json": _turns('{"name": "' + _NAME + '", "parameters": ' + _ARGUMENTS + "}"),
    "pythonic": _turns(
        "{{ c.function.name }}(" + _EACH + "{{ k }}={{ v }}{% if not loop.last %}, {% endif %}{% endfor %})", "[", ", ", "]"
    ),
    "harmony": _HARMONY,
}

# A template that thinks: it shows what was thought, and begins the thought where it is asked to.
THINKING = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    + "{% for c in m.tool_calls or [] %}<tool_call>\n"
    + _OBJECT
    + "\n</tool_call>{% endfor %}"
    + _CLOSED
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
# One that cuts thoughts out of what it is sent back, and begins one itself.
CUTTING = (
    "{% for m in messages %}"
    + _TURN
    + "{{ m.content.split('</think>')[-1] }}"
    + _CLOSED
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
