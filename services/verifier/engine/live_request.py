"""One live request inside the decoding loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from services.verifier.engine.mailbox import Mailbox
from speculation.acceptance import StopRule, stop_token_ids
from speculation.budget import Wanted
from speculation.choose import LogitsPipeline
from speculation.errors import InvalidArgument, PromptTooLong
from speculation.messages import Finished, GenerationRequest, OpenSession, Progress, StepReport
from speculation.ports import Target
from speculation.types import FinishReason, TokenTree, Verdict

# A request asks for twice the nodes that any of its last steps could use, and for a few at least.
_REMEMBERED = 8
_FEWEST = 4


def check_request(request: GenerationRequest, target: Target) -> None:
    """Check what only a target can know.

    Raises:
        InvalidArgument: no prompt, or a token id outside the vocabulary; names the field.
        PromptTooLong: nothing could follow the prompt.
    """
    prompt, most, vocab = request.prompt, target.max_model_len, target.vocab_size
    if not prompt:
        raise InvalidArgument("prompt", "empty", "at least one token")
    if len(prompt) >= most:
        raise PromptTooLong("prompt", f"{len(prompt)} tokens", f"at most {most - 1} tokens (max_model_len is {most})")
    for name, ids in (
        ("prompt_token_ids", prompt),
        ("committed_token_ids", request.committed),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
    ):
        for token in ids:
            if not 0 <= token < vocab:
                raise InvalidArgument(name, token, f"token ids below {vocab}")


class LiveRequest:
    """State of a request: what is committed, what is computed, which drafts wait.

    Attributes:
        tenant: who shares what it leaves behind.
        tokens: prompt and answer so far. Its last one is pending: committed, but not computed.
        computed: tokens whose keys and values the target holds.
        max_nodes: most nodes of its tree.
        events: what the consumer reads; ends in ``Finished`` or an exception.
        closed: nobody reads any more.
        admitted: it has been let in, though it may have had to step back.
        in_pass: a pass that is under way holds its rows.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pipeline: LogitsPipeline | None,
        eos_token_ids: frozenset[int],
        *,
        max_model_len: int,
        max_nodes: int,
    ) -> None:
        self.request = request
        self.tenant = request.tenant
        self.pipeline = pipeline
        self.tokens = [*request.prompt, *request.committed]
        self.computed = 0
        self.drafts = Mailbox(self.tokens)
        self.events: asyncio.Queue[Progress | Finished | BaseException] = asyncio.Queue()
        self.closed = False
        self.admitted = False
        self.in_pass = False
        self.submitted_at = time.perf_counter()
        self.queue_s = 0.0
        self.max_nodes = min(max_nodes, request.plan.max_nodes)
        # Of the last steps that had a draft: nodes that the budget let through, all of them counting as the most.
        self._chosen: deque[int] = deque([self.max_nodes], maxlen=_REMEMBERED)
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
        self._stop_ids = stop_token_ids(request.sampling, eos_token_ids)

    @property
    def id(self) -> str:
        """The request's id; sessions with drafters carry it too."""
        return self.request.request_id

    def forget_tenant(self) -> None:
        """From now on nobody shares what this request leaves, however often it steps back or is drafted for anew."""
        self.tenant = f"forgotten/{self.id}"

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def stop_rule(self) -> StopRule:
        """When the answer ends, from where it stands now."""
        return StopRule(stop_token_ids=self._stop_ids, generated=self.generated, room=self._room)

    @property
    def ended(self) -> FinishReason | None:
        """Why nothing is left to do, where what an earlier verifier committed is the whole answer."""
        committed = list(self.request.committed)
        rule = StopRule(stop_token_ids=self._stop_ids, generated=0, room=self._room)
        return rule.after(committed) if committed else None

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append what a step decided."""
        self.tokens.extend(tokens)
        self.drafts.commit(len(self.tokens), tokens)

    def take_tree(self) -> TokenTree:
        """The tree that the coming step may check."""
        # The last token of the answer needs no row: nothing is chosen after it.
        max_depth = self._room - self.generated - 1
        return self.drafts.take(self.tokens, self.max_nodes, max_depth)

    def note_choice(self, drafted: int, chosen: int) -> None:
        """Remember how many of a draft's nodes were worth their rows."""
        if drafted:
            self._chosen.append(self.max_nodes if chosen == drafted else chosen)

    @property
    def wanted_nodes(self) -> int:
        """How many nodes the next draft should have: where rows are dear, drafting what nobody checks costs time as well.

        Not where drafts are sent ahead: there nobody waits, and what is left of a large tree serves the step after, too.
        """
        if self.drafts.ahead:
            return self.max_nodes
        return min(self.max_nodes, max(_FEWEST, 2 * max(self._chosen)))

    def opening(self) -> OpenSession:
        """The message that starts a drafter's session, now or late."""
        return OpenSession(
            session_id=self.id,
            tokens=tuple(self.tokens),
            prompt_length=len(self.request.prompt),
            sources=self.request.plan.sources,
            max_nodes=self.max_nodes,
            temperature=self.request.sampling.temperature,
            tenant=self.tenant,
        )

    def report(self, verdict: Verdict, wanted: Wanted) -> StepReport:
        """What the drafter is told of a step, once it is committed, and of what the next one wants.

        Where drafts are sent ahead nobody waits, and what is left of a large tree serves the step after, too.
        """
        nodes = self.max_nodes if self.drafts.ahead else min(self.wanted_nodes, wanted.nodes)
        return StepReport(
            session_id=self.id,
            committed=verdict.committed,
            length=verdict.length,
            prefix_hash=self.drafts.prefix_hash,
            accepted_path=verdict.accepted_path,
            max_nodes=nodes,
            min_probability=0.0 if self.drafts.ahead else wanted.min_probability,
            observation=verdict.observation,
        )

    def finish(self, reason: FinishReason) -> None:
        """End with an answer."""
        self.events.put_nowait(Finished(reason=reason))

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.events.put_nowait(error)
