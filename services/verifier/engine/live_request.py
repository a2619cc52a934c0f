"""One live request inside the decoding loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from services.verifier.engine.mailbox import Mailbox, Prefixes, ReadyDraft
from services.verifier.target_port import Target
from speculation.acceptance import StopRule, stop_token_ids
from speculation.budget import Wanted
from speculation.errors import InvalidArgument, PromptTooLong
from speculation.messages import Finished, GenerationRequest, OpenSession, Progress, StepReport
from speculation.tree import merge, prune
from speculation.types import EMPTY_TREE, FinishReason, TokenTree, Verdict

# A request asks for twice the nodes that any of its last steps could use, and for a few at least.
_REMEMBERED = 8
_FEWEST = 4


def check_request(request: GenerationRequest, target: Target) -> None:
    """Check what only a target can know.

    Raises:
        InvalidArgument: no prompt, a token id outside the vocabulary, or a layer that there is not; names the field.
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
    target.check_layers(request.plan.observe_layers)


class LiveRequest:
    """State of a request: what is committed, what is computed, which drafts wait.

    Attributes:
        tenant: who shares what it leaves behind.
        tokens: prompt and answer so far. Its last one is pending: committed, but not computed.
        computed: tokens whose keys and values the target holds.
        max_nodes: most nodes of its tree.
        prefixes: what drafts for it may grow from.
        mailboxes: its drafts, by the name of the origin that they come from.
        waited_since: when the coming step began to wait for drafts, where nobody waits for others' sake; and what was
            ``expected`` before.
        observed: positions whose hidden states have been reported, where anybody asks: all before this one.
        events: what the consumer reads; ends in ``Finished`` or an exception.
        closed: nobody reads any more.
        admitted: it has been let in, though it may have had to step back.
        in_pass: a pass that is under way holds its rows.
        ended: it has been answered to the end, or failed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        *,
        max_model_len: int,
        max_nodes: int,
    ) -> None:
        self.request = request
        self.tenant = request.tenant
        self.tokens = [*request.prompt, *request.committed]
        self.computed = 0
        self.prefixes = Prefixes(self.tokens)
        self.mailboxes: dict[str, Mailbox] = {}
        self.waited_since: tuple[float, float] | None = None
        self.observed = 0
        self.events: asyncio.Queue[Progress | Finished | BaseException] = asyncio.Queue()
        self.closed = False
        self.admitted = False
        self.in_pass = False
        self.ended = False
        self.submitted_at = time.perf_counter()
        self.queue_s = 0.0
        self.max_nodes = min(max_nodes, request.plan.max_nodes)
        # Of the last steps that had a draft: nodes that the budget let through, all of them counting as the most.
        self._chosen: deque[int] = deque([self.max_nodes], maxlen=_REMEMBERED)
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
        self._stop_ids = stop_token_ids(request.sampling, eos_token_ids)
        self._unsent: list[Progress | Finished] = []

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
    def complete(self) -> FinishReason | None:
        """Why nothing is left to do, where what an earlier verifier committed is the whole answer."""
        committed = list(self.request.committed)
        rule = StopRule(stop_token_ids=self._stop_ids, generated=0, room=self._room)
        return rule.after(committed) if committed else None

    @property
    def decoding(self) -> bool:
        """Whether the coming pass decides its next token whatever else it holds: its prompt is through."""
        return self.computed == len(self.tokens) - 1

    @property
    def undrafted(self) -> bool:
        """Whether nobody drafts for it."""
        return all(mailbox.given_up for mailbox in self.mailboxes.values())

    def ready(self) -> dict[tuple[str, str], ReadyDraft]:
        """The drafts that lie ready for the coming step, by origin and group."""
        return {
            (origin, found.draft.group): found
            for origin, mailbox in self.mailboxes.items()
            for found in mailbox.find(self.tokens)
        }

    def expected(self) -> float:
        """How many tokens they are expected to get accepted."""
        return max(
            (
                self.mailboxes[origin].worth(group).of(late=found.late)
                for (origin, group), found in self.ready().items()
                if len(found.tree)
            ),
            default=0.0,
        )

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append what a step decided."""
        for mailbox in self.mailboxes.values():
            mailbox.learn(self.tokens, tokens, self.most_credited)
        self.tokens.extend(tokens)
        self.prefixes.commit(len(self.tokens), tokens)
        for mailbox in self.mailboxes.values():
            mailbox.drop_old()

    @property
    def most_credited(self) -> int:
        """How many tokens of a draft the budget would let through, as far as the last steps show."""
        return max(self._chosen)

    def take_tree(self, probabilities: Callable[[TokenTree], list[float]]) -> TokenTree:
        """The one tree that the coming step may check: what lies ready, of all origins, merged.

        Args:
            probabilities: of each node of a tree, that the target takes the path to it.
        """
        # The last token of the answer needs no row: nothing is chosen after it.
        max_depth = self._room - self.generated - 1
        trees = [found.tree for found in self.ready().values() if len(found.tree)]
        if self.request.plan.acceptance == "rejection":
            # Sampled tokens must not be left out by looking at them; by their number all of them may. They are of one q: the
            # first tree there is.
            sampled = [tree for tree in trees if tree.proposals]
            if sampled:
                tree = sampled[0]
                return tree if len(tree) <= self.max_nodes and len(tree) <= max_depth else EMPTY_TREE
        trees = [replace(tree, proposals=()) if tree.proposals else tree for tree in trees]
        if not trees:
            return EMPTY_TREE
        tree = merge(trees, probabilities) if len(trees) > 1 else trees[0]
        return prune(tree, self.max_nodes, max_depth, probabilities(tree))

    def note_choice(self, drafted: int, chosen: int) -> None:
        """Remember how many of a draft's nodes were worth their rows."""
        if drafted:
            self._chosen.append(self.max_nodes if chosen == drafted else chosen)

    def _wanted_nodes(self, mailbox: Mailbox, wanted: Wanted) -> int:
        """How many nodes the next draft should have: where rows are dear, drafting what nobody checks costs time as well.

        Not where drafts are sent ahead: there nobody waits, and what is left of a large tree serves the step after, too.
        """
        if mailbox.ahead:
            return self.max_nodes
        return min(self.max_nodes, wanted.nodes, max(_FEWEST, 2 * max(self._chosen)))

    def opening(self, sources: tuple[str, ...]) -> OpenSession:
        """The message that starts a drafter's session with ``sources``, now or late."""
        return OpenSession(
            session_id=self.id,
            tokens=tuple(self.tokens),
            prompt_length=len(self.request.prompt),
            sources=sources,
            max_nodes=self.max_nodes,
            temperature=self.request.sampling.temperature,
            tenant=self.tenant,
            traceparent=self.request.traceparent,
        )

    def report(self, mailbox: Mailbox, verdict: Verdict, wanted: Wanted, *, asks: bool) -> StepReport:
        """What an origin is told of a step, once it is committed, and of what the next one wants.

        Args:
            asks: whether another draft is asked for at all.
        """
        return StepReport(
            session_id=self.id,
            committed=verdict.committed,
            length=verdict.length,
            prefix_hash=self.prefixes.hash,
            accepted_path=verdict.accepted_path,
            max_nodes=self._wanted_nodes(mailbox, wanted) if asks else 0,
            min_probability=0.0 if mailbox.ahead else wanted.min_probability,
            observation=verdict.observation,
        )

    def say(self, event: Progress | Finished) -> None:
        """Tell the consumer something, with the next ``flush``."""
        self._unsent.append(event)

    def flush(self) -> None:
        """Hand over what was said."""
        for event in self._unsent:
            self.events.put_nowait(event)
        self._unsent.clear()

    def finish(self, reason: FinishReason) -> None:
        """End with an answer, at the next ``flush``."""
        self.ended = True
        self.say(Finished(reason=reason))

    def fail(self, error: BaseException) -> None:
        """End with an error, after all that was said."""
        if not self.ended:
            self.ended = True
            self.flush()
            self.events.put_nowait(error)
