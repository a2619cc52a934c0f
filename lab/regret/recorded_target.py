"""A target that says what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lab.regret.recorded_answers import RecordedAnswer
from services.verifier.model.target_port import (
    NOT_CHOSEN,
    ColumnRows,
    Outcome,
    Prefix,
    Rows,
    Sampling,
    SingleRows,
    StreamSpec,
)
from speculation.errors import InvalidArgument
from speculation.types import Features

# The likeliest ids after a text, likeliest first.
Likeliest = Callable[[Sequence[int]], tuple[int, ...]]


class LikeliestElsewhere:
    """What was likeliest after texts that no recording goes on from: what it was after the same two tokens, or one.

    Drafters learn from the target's opinion of rejected drafts as well. A recording does not have it.
    """

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._any: tuple[int, ...] = ()
        for answer in answers:
            text = (*answer.prompt_ids, *answer.output_ids)
            for position, likeliest in enumerate(answer.top_ids, len(answer.prompt_ids)):
                for order in (1, 2):
                    self._after[text[max(0, position - order) : position]] = likeliest
                self._any = likeliest

    def __call__(self, text: Sequence[int]) -> tuple[int, ...]:
        """The ids after ``text``, likeliest first."""
        return self._after.get(tuple(text[-2:])) or self._after.get(tuple(text[-1:])) or self._any


class RecordedTarget:
    """Implements ``Target``: after a prompt it says the recorded answer, whatever was drafted.

    Args:
        answers: no two of them with the same prompt and temperature.
        elsewhere: the likeliest ids after texts that are not the recording's.
    """

    depth = processes = 1
    eos_token_ids: frozenset[int] = frozenset()
    choosing_s = 0.0

    def __init__(self, answers: Sequence[RecordedAnswer], elsewhere: Likeliest, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = 1 + max(len(each.prompt_ids) + len(each.output_ids) for each in answers)
        self._elsewhere = elsewhere
        self._answers = {(each.prompt_ids, each.temperature): each for each in answers}
        if len(self._answers) < len(answers):
            raise ValueError("two answers have the same prompt and temperature")
        self._said: dict[str, RecordedAnswer] = {}
        self._batch: Sequence[Rows] = ()

    def open(
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        if prefix is None or sampling is None:
            raise ValueError("without a prompt and its temperature, the recording is unknown")
        prompt = tuple(prefix.tokens[: sampling.prompt_length])
        self._said[request_id] = self._answers[prompt, sampling.params.temperature]
        return True

    def computed(self, request_id: str) -> int:
        return 0

    def grow(self, request_id: str, rows: int) -> int:
        return rows

    def begin(self, batch: Sequence[Rows]) -> None:
        self._batch = batch

    def finish(self) -> list[Outcome]:
        batch, self._batch = self._batch, ()
        return [self._outcome(rows) for rows in batch]

    def _outcome(self, rows: Rows) -> Outcome:
        if not rows.logits:
            return Outcome()
        said = self._said[rows.request_id]
        # Of each row: its path from the chain's last token, and whether that is what was recorded.
        paths: list[tuple[int, ...]] = [()]
        right = [True]
        at = rows.context + rows.chain - len(said.prompt_ids)
        for token, parent in zip(rows.tokens[rows.chain :], rows.parents, strict=True):
            path = (*paths[parent + 1], token)
            place = at + len(path) - 1
            right.append(right[parent + 1] and place < len(said.output_ids) and said.output_ids[place] == token)
            paths.append(path)
        places = [at + len(path) for path in paths]
        known = [it and place < len(said.output_ids) for it, place in zip(right, places, strict=True)]
        top: list[tuple[int, ...]] = []
        if rows.top_k:
            text = (*said.prompt_ids, *said.output_ids[:at])[-2:]
            top = [
                (said.top_ids[place] if it else self._elsewhere((*text, *path)))[: rows.top_k]
                for it, place, path in zip(known, places, paths, strict=True)
            ]
        choices = (said.output_ids[place] if it else NOT_CHOSEN for it, place in zip(known, places, strict=True))
        return Outcome(choices=tuple(choices), top_ids=tuple(top))

    def check_layers(self, layers: Sequence[int]) -> None:
        if layers:
            raise InvalidArgument("layers", tuple(layers), "none: a recording has no hidden states")

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return None

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        pass

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        raise NotImplementedError("a recording has no hidden states")

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        pass

    def keep_singles(self, batch: SingleRows) -> None:
        pass

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        pass

    def close(self, request_id: str) -> None:
        self._said.pop(request_id, None)

    def forget(self, tenant: str) -> None:
        pass

    def beat(self) -> None:
        pass

    def recover(self) -> None:
        self._said.clear()

    def shutdown(self) -> None:
        pass
