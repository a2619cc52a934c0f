"""Watches from inside while a run goes on: who is admitted before whom, and from which prefix a draft is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.ready_draft import ReadyDraft
from services.verifier.kv_cache.blocks import BlockAllocator
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import descend


def newcomer_first(engine: DecodingLoop, request_id: str) -> str | None:
    """What is wrong if this request is admitted now: one that has begun, of its tenant and priority, waits behind it."""
    waiting = list(engine._requests.waiting)
    own = next((each for each in waiting if each.id == request_id), None)
    if own is None or own.message.committed or own.admitted:
        return None
    for each in waiting:
        same = each.message.tenant == own.message.tenant and each.message.priority == own.message.priority
        if same and (each.message.committed or each.admitted) and not each.closed:
            return f"{request_id} is new and admitted before {each.id}, which has begun"
    return None


def waited_too_long(engine: DecodingLoop, request_id: str, now_s: float) -> str | None:
    """What is wrong if this request is admitted now: it is new, and has waited for longer than ``max_wait_s``."""
    most_s = engine._requests._config.max_wait_s
    own = next((each for each in engine._requests.waiting if each.id == request_id), None)
    if most_s is None or own is None or own.message.committed or own.admitted or now_s - own.submitted_at <= most_s:
        return None
    return f"{request_id} is admitted after {now_s - own.submitted_at:.1f} s, and may wait for {most_s:g}"


def used_and_free(blocks: BlockAllocator) -> str | None:
    """What is wrong with the pool: a block that a request uses is free for others."""
    used = {block for own in blocks._owners.values() for block in own.blocks}
    both = used & {*blocks._free, *blocks._idle}
    return f"blocks {sorted(both)} are used and free" if both else None


@contextmanager
def drafts_watched(tell: Callable[[str], None]) -> Iterator[None]:
    """During the block, every draft that a step may take is compared with the text that it is taken for."""
    find = Mailbox.find

    def watched(self: Mailbox, tokens: Sequence[int]) -> list[ReadyDraft]:
        found = find(self, tokens)
        for ready in found:
            if (wrong := _wrong(ready, tokens)) is not None:
                tell(wrong)
        return found

    with patch.object(Mailbox, "find", watched):
        yield


def _wrong(ready: ReadyDraft, tokens: Sequence[int]) -> str | None:
    draft = ready.draft
    begin, end = draft.base_length, draft.base_length + len(draft.assumed)
    if extend_hash(EMPTY_HASH, tokens[:begin]) != draft.base_hash or tuple(tokens[begin:end]) != draft.assumed:
        return f"a draft for another text is taken after {len(tokens)} tokens of {draft.session_id}"
    since = tuple(tokens[end:])
    if ready.tree is not draft.tree and ready.tree != descend(draft.tree, since):
        return f"a late draft's wrong part is taken after {len(tokens)} tokens of {draft.session_id}"
    if ready.tree is draft.tree and since:
        return f"a late draft is taken whole after {len(tokens)} tokens of {draft.session_id}"
    return None
