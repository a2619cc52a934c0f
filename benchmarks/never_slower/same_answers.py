"""Compares answers with plain decoding's of the same request, also where one of them was cut off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchmarks.never_slower.load import LoadAnswer
from benchmarks.never_slower.requests import LoadRequest

Reference = Mapping[str, LoadAnswer]


def longest_answers(answers: Iterable[LoadAnswer]) -> dict[str, LoadAnswer]:
    """The longest of every request's answers, by the request's name."""
    found: dict[str, LoadAnswer] = {}
    for answer in answers:
        known = found.get(answer.request.name)
        if known is None or len(answer.tokens) > len(known.tokens):
            found[answer.request.name] = answer
    return found


def unanswered(answers: Iterable[LoadAnswer], reference: Reference) -> list[LoadRequest]:
    """What plain decoding has still to be asked, so that every token of ``answers`` can be compared."""
    missing = []
    for name, answer in longest_answers(answers).items():
        known = reference.get(name)
        if answer.tokens and (known is None or (len(known.tokens) < len(answer.tokens) and not known.finished)):
            missing.append(answer.request if answer.finished else replace(answer.request, max_tokens=len(answer.tokens)))
    return missing


def differences_from(reference: Reference, answers: Iterable[LoadAnswer]) -> list[str]:
    """Where answers differ from those in ``reference``, one sentence for each that does."""
    return [said for answer in answers if answer.tokens and (said := _difference(answer, reference[answer.request.name]))]


def _difference(answer: LoadAnswer, plain: LoadAnswer) -> str:
    where = f"{answer.request.name}, seed {answer.request.seed}, token"
    for place, (token, expected) in enumerate(zip(answer.tokens, plain.tokens, strict=False)):
        if token != expected:
            return f"{where} {place}: {token} instead of {expected}"
    count = len(answer.tokens)
    # Where plain decoding's answer was cut to this length, it says nothing about what would have followed.
    if answer.finished and len(plain.tokens) > count:
        return f"{where} {count}: none instead of {plain.tokens[count]}"
    if plain.finished and len(plain.tokens) < count:
        return f"{where} {len(plain.tokens)}: {answer.tokens[len(plain.tokens)]} instead of none"
    return ""
