"""Faults planted into the product. Each must be found within the budget of CI: that is the simulation's own test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from services.access.gate import Gate
from services.access.key_records import KeyRecord
from services.access.key_use import KeyUse
from services.router import migration
from services.verifier.changing.reloading import Reloading
from services.verifier.engine import forgetting, treed, verify
from services.verifier.engine.admission import Admission
from services.verifier.engine.fair_queue import FairQueue
from services.verifier.engine.identity import Identity
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.pause import Hold, Pause
from services.verifier.engine.prefixes import Prefixes
from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.service import VerifierService
from speculation import acceptance
from speculation.messages import Draft, GenerationRequest
from tests.simulation.gates import Audit
from tests.simulation.serve_handles import Stream


@contextmanager
def _committed_token_dropped() -> Iterator[None]:
    def replaced(request: GenerationRequest, **given: Any) -> GenerationRequest:
        given["committed"] = given["committed"][:-1] if len(given["committed"]) > 1 else given["committed"]
        return replace(request, **given)

    with patch.object(migration, "replace", replaced):
        yield


@contextmanager
def _preemption_loses_a_block() -> Iterator[None]:
    preempt = Admission._preempt

    def losing(self: Admission, request: LiveRequest, why: str) -> None:
        self._target.blocks.blocks_of(request.id).pop()  # type: ignore[attr-defined]
        preempt(self, request, why)

    with patch.object(Admission, "_preempt", losing):
        yield


@contextmanager
def _preemption_keeps_its_place() -> Iterator[None]:
    """The first token is not computed again."""
    admit = Admission.admit

    def admitting(self: Admission) -> list[LiveRequest]:
        waited = [request for request in self.waiting if request.admitted]
        new = admit(self)
        for request in waited:
            if request.id in self.running and not request.computed:
                request.computed = 1
        return new

    with patch.object(Admission, "admit", admitting):
        yield


@contextmanager
def _stale_draft_taken() -> Iterator[None]:
    def since(self: Prefixes, draft: Draft, tokens: Sequence[int]) -> tuple[int, ...] | None:
        end = draft.base_length + len(draft.assumed)
        return None if end > len(tokens) else tuple(tokens[end:])

    with patch.object(Prefixes, "since", since):
        yield


@contextmanager
def _drafted_token_believed() -> Iterator[None]:
    """The last token of a draft counts as the target's own."""
    walk = acceptance.walk

    def believing(tree: Any, choose_at: Callable[[int], int], stop: Any) -> Any:
        return walk(tree, lambda node: tree.tokens[0] if node < 0 and len(tree) == 1 else choose_at(node), stop)

    # What is compiled stands for the walk where it can.
    with (
        patch.object(acceptance, "walk", believing),
        patch.object(verify, "walk_together", lambda *_: None),
        patch.object(treed, "walk_together", lambda *_: None),
    ):
        yield


@contextmanager
def _slot_given_back_twice() -> Iterator[None]:
    def leave(self: KeyUse) -> None:
        self._running -= 2 if self._running > 1 else 1

    with patch.object(KeyUse, "leave", leave):
        yield


@contextmanager
def _block_given_back_twice() -> Iterator[None]:
    """A block that two requests share is free once the first of them ends."""
    release = BlockAllocator.release

    def releasing(self: BlockAllocator, owner: str) -> None:
        for block in self._owners[owner].blocks if owner in self._owners else ():
            self._users[block] = 1
        release(self, owner)
        for other in self._owners.values():
            for block in other.blocks:
                self._users.setdefault(block, 1)

    with patch.object(BlockAllocator, "release", releasing):
        yield


@contextmanager
def _state_of_a_token_before() -> Iterator[None]:
    """What is kept at a border is the state one token before it."""
    save = BlockAllocator.save_states

    def saving(self: BlockAllocator, owner: str, length: int) -> list[tuple[int, int]]:
        return [(border - 1, slot) for border, slot in save(self, owner, length)]

    with patch.object(BlockAllocator, "save_states", saving):
        yield


@contextmanager
def _state_outlives_its_block() -> Iterator[None]:
    """A block that another text takes has the state of the text before."""
    unseal = BlockAllocator._unseal

    def unsealing(self: BlockAllocator, block: int) -> None:
        states, self._states = self._states, None
        unseal(self, block)
        self._states = states

    with patch.object(BlockAllocator, "_unseal", unsealing):
        yield


@contextmanager
def _slot_of_a_state_lost() -> Iterator[None]:
    """A request that ends before its state is shared keeps the slot."""
    release = BlockAllocator.release

    def releasing(self: BlockAllocator, owner: str) -> None:
        if owner in self._owners:
            self._owners[owner].saved.clear()
        release(self, owner)

    with patch.object(BlockAllocator, "release", releasing):
        yield


@contextmanager
def _begun_answer_evicted() -> Iterator[None]:
    """An answer that moves competes with newcomers."""
    check = Admission.check

    def checking(self: Admission, message: GenerationRequest) -> None:
        check(self, replace(message, committed=()))

    begun = property(lambda self: self.admitted)
    with patch.object(Admission, "check", checking), patch.object(LiveRequest, "begun", begun):
        yield


@contextmanager
def _newcomers_first() -> Iterator[None]:
    append = FairQueue.append

    def appending(self: FairQueue, request: LiveRequest) -> None:
        append(self, request)
        line = self._lines[request.message.tenant]
        line.remove(request)
        line.appendleft(request)

    with patch.object(FairQueue, "append", appending):
        yield


@contextmanager
def _answer_moves_to_other_weights() -> Iterator[None]:
    """A verifier goes on with an answer that one with other weights has begun."""
    with patch.object(Identity, "check", lambda self, request: None):
        yield


@contextmanager
def _wait_has_no_end() -> Iterator[None]:
    """A request that has waited for too long is not refused."""
    with patch.object(Admission, "_end_late", lambda self: None):
        yield


@contextmanager
def _given_up_and_decoded() -> Iterator[None]:
    """A verifier does not hear that a router has given a call up."""
    with patch.object(Stream, "cancel", lambda self: None):
        yield


@contextmanager
def _new_key_counts_anew() -> Iterator[None]:
    """A key that takes another one's place does not count the requests that run with that."""

    def use(self: Gate, record: KeyRecord) -> KeyUse:
        found = self._uses.setdefault(record.hash, self._new_use(record))
        found.follow(record)
        return found

    with patch.object(Gate, "_use", use):
        yield


@contextmanager
def _target_keeps_the_forgotten() -> Iterator[None]:
    def between_passes(self: forgetting.Forgetting) -> None:
        while self._waiting:
            forgetting._done(self._waiting.popitem()[1])

    with patch.object(forgetting.Forgetting, "between_passes", between_passes):
        yield


@contextmanager
def _tokens_not_charged() -> Iterator[None]:
    with patch.object(KeyUse, "charge", lambda self, tokens: None):
        yield


@contextmanager
def _cancelled_call_not_recorded() -> Iterator[None]:
    write = Audit.write

    def writing(self: Audit, **said: object) -> None:
        if said.get("outcome") != "cancelled":
            write(self, **said)

    with patch.object(Audit, "write", writing):
        yield


@contextmanager
def _pause_confirmed_and_not_made() -> Iterator[None]:
    async def begin(self: Hold) -> None:
        pass

    with patch.object(Hold, "begin", begin):
        yield


@contextmanager
def _exchanged_in_mid_answer() -> Iterator[None]:
    """A reload does not wait for the answers under way."""
    with patch.object(Pause, "under_way", property(lambda self: [])):
        yield


@contextmanager
def _rows_outlive_their_weights() -> Iterator[None]:
    """Blocks that the weights before have computed are shared with answers of the new ones."""
    with patch.object(BlockAllocator, "forget_all", lambda self: None):
        yield


@contextmanager
def _reload_stays_open() -> Iterator[None]:
    """A verifier waits for a router that has died for ever."""
    with patch.object(Reloading, "_give_up", lambda self, reload_id: None):
        yield


@contextmanager
def _first_weights_again() -> Iterator[None]:
    """A verifier that starts does not take the weights that the others serve."""

    async def take(self: VerifierService, folder: str, digest: str) -> None:
        pass

    with patch.object(VerifierService, "take_weights", take):
        yield


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a committed token is dropped": _committed_token_dropped,
    "a preemption loses a block": _preemption_loses_a_block,
    "a preempted text is not computed again": _preemption_keeps_its_place,
    "a stale draft is taken": _stale_draft_taken,
    "a drafted token is believed": _drafted_token_believed,
    "a slot is given back twice": _slot_given_back_twice,
    "a shared block is given back twice": _block_given_back_twice,
    "a state is kept a token too early": _state_of_a_token_before,
    "a state outlives its block": _state_outlives_its_block,
    "a state's slot is lost": _slot_of_a_state_lost,
    "a begun answer is evicted": _begun_answer_evicted,
    "newcomers go first": _newcomers_first,
    "an answer moves to other weights": _answer_moves_to_other_weights,
    "a wait has no end": _wait_has_no_end,
    "what was given up is decoded": _given_up_and_decoded,
    "a new key counts anew": _new_key_counts_anew,
    "the target keeps the forgotten": _target_keeps_the_forgotten,
    "tokens are not charged": _tokens_not_charged,
    "a cancelled call is not recorded": _cancelled_call_not_recorded,
    "a pause is confirmed and not made": _pause_confirmed_and_not_made,
    "weights are exchanged in mid-answer": _exchanged_in_mid_answer,
    "rows outlive their weights": _rows_outlive_their_weights,
    "a reload stays open": _reload_stays_open,
    "a verifier starts with the first weights": _first_weights_again,
}
