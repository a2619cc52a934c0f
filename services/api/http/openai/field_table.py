"""Every field of a request's body, and what becomes of it: honoured, without effect, or refused. Printed for the docs by
``python -m services.api.http.openai.field_table``.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.api.http.openai import field_rules

# What is read of both bodies, and what is to be said of it.
_SHARED: dict[str, str] = {
    "model": "one of the served names; unset: the first",
    "temperature": "0 to 2; below 0.001 it is 0, the likeliest token",
    "top_p": "0 keeps the likeliest token alone",
    "top_k": "-1 and 0: all",
    "min_p": "",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": "",
    "logit_bias": "",
    "seed": "the same seed, the same answer; unset: drawn, and told in the answer",
    "n": "the next choice has the next seed",
    "best_of": "n, or 1 where n is 1: answers are not ranked",
    "max_tokens": "",
    "min_tokens": "",
    "stop": "texts; the name of a special token ends the answer at that token",
    "stop_token_ids": "",
    "include_stop_str_in_output": "",
    "ignore_eos": "",
    "bad_words": "",
    "allowed_token_ids": "",
    "skip_special_tokens": "",
    "ignore_generation_config": "of the model, but its end-of-text tokens",
    "logprobs": "",
    "prompt_logprobs": "of whole answers; the prompt is then computed from its beginning",
    "response_format": "",
    "structured_outputs": "",
    **{f"guided_{kind}": f"as structured_outputs.{kind}" for kind in ("json", "json_object", "regex", "choice", "grammar")},
    "stream": "",
    "stream_options": "without effect where stream is not true",
    "stream_interval": "",
    "prediction": "drafted from",
    "speculation": "strategy, num_speculative_tokens, acceptance",
    "truncate_prompt_tokens": "",
    "truncation_side": "left unless it says right: which side is cut off",
    "privacy": "",
    "cache_salt": "",
    "priority": "among the same key's requests",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
    "request_id": "",
}
CHAT: dict[str, str] = {
    **_SHARED,
    "messages": "text; id, cache_control and the like in messages, parts and tools are without effect; reasoning_content "
    "(reasoning) that the template does not read is named in x-outrider-ignored (server.unknown_fields)",
    "max_completion_tokens": "as max_tokens",
    "top_logprobs": "",
    "tools": "also where the chat template has no place for them (server.tools)",
    "tool_choice": "",
    "parallel_tool_calls": "",
    "chat_template_kwargs": "what the template does not read is named in x-outrider-ignored (server.unknown_fields)",
    "include_reasoning": "false: the answer leaves out reasoning_content; the model thinks all the same",
    "reasoning_effort": "as an option of the chat template, if it reads it",
    "add_generation_prompt": "",
    "continue_final_message": "",
}
# A conversation has it as a harmless value alone.
del CHAT["best_of"]
COMPLETION: dict[str, str] = {
    **_SHARED,
    "prompt": "a text, token ids, or a list of either",
    "max_tokens": "0: what is said of the prompt alone",
    "suffix": "the text behind a gap, of models with fill-in-the-middle tokens; empty: text is continued",
    "echo": "with logprobs, the prompt's own log-probabilities, too",
    "logprobs": "how many likeliest tokens, 0 to 20",
}
# All that a body may be known for; a query that names one is refused, since it is said in the wrong place.
KNOWN = frozenset({*CHAT, *COMPLETION, *field_rules.CHAT, *field_rules.COMPLETION, *field_rules.HINTS})


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Fields of OpenAI's API",
        "",
        "Made from the code: `python -m services.api.http.openai.field_table > docs/openai_fields.md`.",
        "",
        "A field is honoured, or without effect, since no value that is taken could change the answer, or refused by name. "
        "null is unset. Fields that are not here are refused, too. Embeddings, reranking, audio, images and beam search are "
        "not served.",
    ]
    for title, honoured, rules in (
        ("/v1/chat/completions", CHAT, field_rules.CHAT),
        ("/v1/completions", COMPLETION, field_rules.COMPLETION),
    ):
        lines += ["", f"## {title}", "", "| field | | values |", "|---|---|---|"]
        lines += [f"| `{name}` | honoured | {note} |" for name, note in sorted(honoured.items())]
        lines += _rules(rules)
    lines += ["", "## Of other servers", "", "| field | | values |", "|---|---|---|"]
    lines += [f"| `{name}` | refused | {hint} |" for name, hint in sorted(field_rules.HINTS.items())]
    return "\n".join(lines) + "\n"


def _rules(rules: Mapping[str, field_rules.Rule]) -> list[str]:
    return [
        f"| `{name}` | {'refused' if harmless is field_rules.never else 'without effect'} | {allowed} |"
        for name, (harmless, allowed) in sorted(rules.items())
    ]


if __name__ == "__main__":
    print(page(), end="")
