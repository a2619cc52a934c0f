"""A request inside the decoding loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from services.verifier.choosing.word_rule import word_rule
from services.verifier.engine.deciding.asking import Prices
from services.verifier.engine.deciding.source_use import Use
from services.verifier.engine.deciding.stream_ends import EXPLORE_EVERY, MOST_ENDS, choose_ends, stream_source
from services.verifier.engine.events import Events
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.native.commits import CompiledRepetition, repetition_of
from services.verifier.engine.observed import NOTHING, Observes, observed_by
from services.verifier.engine.prefixes import Prefixes
from services.verifier.engine.prompt_scores import PromptScores
from services.verifier.engine.ready_draft import ReadyDraft
from services.verifier.engine.switches import Switches
from services.verifier.grammar.drafts_within import within_grammar
from services.verifier.grammar.grammar_state import GrammarState
from services.verifier.model.target_port import StreamSpec, TokenRule
from speculation.acceptance import StopRule, reason_to_end, stop_token_ids
from speculation.budget import Budget, Wanted
from speculation.messages import Finished, GenerationRequest, Progress, StepReport
from speculation.records import maker
from speculation.room import longest_answer, room_behind
from speculation.tree import fits, merge, prune
from speculation.types import EMPTY_TREE, FinishReason, TokenTree, Verdict

# A request asks for twice as many nodes as the budget chose in the best of its last steps, and for at least a few.
_REMEMBERED = 8
_FEWEST = 4
_make_report, _make_stop_rule = maker(StepReport), maker(StopRule)


class LiveRequest:
    """State of a request: committed tokens, computed tokens, drafts and undelivered events.

    Attributes:
        id: the request's id, which is also the id of its sessions at drafters.
        message: the request as it came.
        tenant: the tenant that shares its cached prefixes; changed by ``forget_tenant``.
        grammar: of the answer, with what is committed of it; None: it may be anything.
        rule: bars tokens: the grammar, and the request's allowed tokens and bad words; None: all may be chosen.
        tokens: prompt and answer so far. The last token is pending: committed, but not computed.
        computed: tokens whose keys and values the target holds; ``room``: rows that it has of the target's cache.
        max_nodes: most nodes of its tree.
        most_credited: accepted tokens that a draft is credited with at most: the most nodes that the budget chose in recent
            steps.
        plain: nothing but its next token is ever wanted of its passes: nobody drafts, and no grammar demands tokens.
        single: it is plain, and its consumer is to be told nothing but its tokens from now on; see ``singles``.
        ordinary: it is drafted for as far as that pays, nothing but tokens and likely ids is wanted of its passes, and its
            tokens are chosen by themselves; see ``together``.
        strategy: as users name it; ``stop_ids``: tokens that end its answer, and ``full_at`` tokens with its prompt do.
        without_streams: its latest steps without any.
        prefixes: recent prefixes that a draft may start from.
        repetition: whether the text begins to repeat itself.
        speculates: its plan has drafts, whether or not anybody drafts for it now.
        by_paper: every step waits for its drafts and checks all of them, whatever that costs.
        sources: those of the plan's sources that draft for it now; ``used`` has more about costly ones.
        mailboxes: its drafts, by the name of their origin.
        switches: which drafts it went without, and why.
        missed: an origin has not heard of it, because nobody may draft now.
        waited_since: when the coming step began to wait for drafts, in seconds of the event loop's clock, and ``expected()``
            at that time; None if it has not waited, or if the wait delayed requests without drafts.
        observed: the hidden states of all positions before this one have been reported.
        scores: log-probabilities of its prompt.
        events: read by the consumer; ends in ``Finished`` or an exception.
        closed: the consumer has stopped reading.
        submitted_at: when it began to wait, in seconds of the event loop's clock.
        admitted: it has been admitted once, and may have been preempted since.
        again: it begins once more, with other weights; ``void``: what was told of it before is; ``successor``: what has
            taken its place so. ``told``: its consumer has been told tokens.
        in_pass: a pass under way holds its rows.
        ended: it has finished or failed.
    """

    # Each step reads most of them, for each request: Python finds so many attributes faster in slots.
    __slots__ = (
        "_chosen", "_observes", "_only_tokens", "_prompt_length", "_room", "_streams", "_words", "admitted", "again",
        "by_paper", "cached", "closed", "computed", "ended", "events", "full_at", "grammar", "id", "in_pass",
        "mailboxes", "max_nodes", "message", "missed", "most_credited", "observed", "ordinary", "plain", "prefixes",
        "queue_s", "repetition", "room", "rule", "scores", "single", "sources", "speculates", "stop_ids", "strategy",
        "submitted_at", "successor", "switches", "tenant", "tokens", "told", "used", "void", "waited_since",
        "without_streams",
    )  # fmt: skip

    def __init__(
        self,
        message: GenerationRequest,
        eos_token_ids: frozenset[int],
        *,
        vocab_size: int,
        max_model_len: int,
        max_nodes: int,
        by_paper: bool,
        grammar: GrammarState | None = None,
        streams: StreamSpec | None = None,
    ) -> None:
        self.message = message
        self.id = message.request_id
        self.grammar = grammar
        self._streams = streams
        plan = message.plan
        self.strategy = plan.strategy
        observes = plan.sources or plan.observe_top_k or plan.observe_layers
        self.plain = not observes and plan.acceptance == "walk" and grammar is None
        self.without_streams = 0
        self.tenant = message.tenant
        self.tokens = [*message.prompt, *message.committed]
        self.computed = 0
        self.room = 0
        self.prefixes = Prefixes(self.tokens)
        self.repetition = repetition_of(self.tokens)
        self.by_paper = by_paper
        self.speculates = message.plan.speculates
        self.sources = message.plan.sources if self.speculates else ()
        self.used: dict[str, Use] = {}
        self.switches = Switches()
        self.mailboxes: dict[str, Mailbox] = {}
        self.missed = False
        self.waited_since: tuple[float, float] | None = None
        self.observed = 0
        self.events = Events()
        self.closed = False
        self.admitted = False
        self.again = self.void = self.told = self.single = False
        self.successor: LiveRequest | None = None
        self.in_pass = False
        self.ended = False
        self.submitted_at = 0.0
        self.queue_s = 0.0
        self.cached = 0
        self.max_nodes = min(max_nodes, message.plan.max_nodes)
        # Nodes that the budget chose in each of the last drafted steps. A draft chosen whole counts as ``max_nodes``.
        self._chosen: deque[int] = deque([self.max_nodes], maxlen=_REMEMBERED)
        self.most_credited = self.max_nodes
        self._prompt_length = len(message.prompt)
        self._room = longest_answer(message.sampling.max_tokens, room=room_behind(len(message.prompt), max_model_len))
        self.full_at = self._prompt_length + self._room
        self.stop_ids = stop_token_ids(message.sampling, eos_token_ids)
        self._words = word_rule(message.sampling, vocab_size, self.stop_ids, grammar)
        if self._words is not None:
            self._words.commit(message.committed)
        self.rule: TokenRule | None = self._words or grammar
        told_more = self.rule is not None or message.sampling.logprobs is not None or plan.report_passes
        self._only_tokens = self.plain and not told_more
        more = told_more or by_paper or plan.observe_layers or message.sampling.prompt_logprobs is not None
        drafted = bool(plan.sources) and plan.acceptance == "walk" and isinstance(self.repetition, CompiledRepetition)
        self.ordinary = drafted and not more
        # For which sources it was made, and what it is.
        self._observes: tuple[tuple[str, ...], Observes] | None = None
        self.scores = PromptScores(wanted=message.sampling.prompt_logprobs is not None and not message.committed)

    def forget_tenant(self) -> None:
        """Move the request to a tenant of its own, so that nothing it leaves in caches from now on is shared."""
        self.tenant = f"forgotten/{self.id}"

    @property
    def begun(self) -> bool:
        """Whether its answer has begun, here or at another verifier: it would be lost if the request were refused."""
        return self.under_way or self.again

    @property
    def under_way(self) -> bool:
        """Whether it has been computed by the present weights, here or at another verifier."""
        return self.admitted or bool(self.message.committed)

    @property
    def latest(self) -> LiveRequest:
        """The one that answers now: itself, or what took its place."""
        return self if self.successor is None else self.successor.latest

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self._prompt_length

    @property
    def stop_rule(self) -> StopRule:
        """The rule that ends the answer, counting from the tokens generated so far."""
        return _make_stop_rule(stop_token_ids=self.stop_ids, generated=self.generated, room=self._room)

    def reason_to_end(self, token: int) -> FinishReason | None:
        """Why the answer ends if ``token`` is committed next; None if it goes on. As ``stop_rule`` says."""
        return reason_to_end(token, len(self.tokens) - self._prompt_length + 1, self.stop_ids, self._room)

    @property
    def complete(self) -> FinishReason | None:
        """The finish reason if an earlier verifier has already committed the whole answer, else None."""
        committed = list(self.message.committed)
        rule = StopRule(stop_token_ids=self.stop_ids, generated=0, room=self._room)
        return rule.after(committed) if committed else None

    @property
    def decoding(self) -> bool:
        """Whether only the pending token is left to compute, so that every pass yields a token."""
        return self.computed == len(self.tokens) - 1

    @property
    def streams(self) -> StreamSpec | None:
        """The streams that its rows may have in a pass; None: none, or nothing drafts from them."""
        return self._streams if self._streams is not None and stream_source(self.sources) else None

    @property
    def rows_wanted(self) -> int:
        """Rows of the KV cache that the next pass needs: those of the tokens, the largest tree and the streams on it."""
        rows = len(self.tokens) + self.max_nodes
        if self._streams is not None and (streams := self.streams) is not None:
            rows += MOST_ENDS * streams.rows
        return rows

    @property
    def observes(self) -> Observes:
        """What is wanted of its passes. If sources were left out, it is what the others want."""
        if self.missed and not self.mailboxes:
            return NOTHING
        if self._observes is None or self._observes[0] is not self.sources:
            self._observes = self.sources, observed_by(self.message.plan, self.sources, self.streams)
        return self._observes[1]

    @property
    def undrafted(self) -> bool:
        """Whether no origin drafts for it, or all have given up."""
        return False not in [mailbox.given_up for mailbox in self.mailboxes.values()]

    def drafts(self) -> list[ReadyDraft]:
        """The drafts at hand for the coming step: at most one of each group of each origin."""
        if len(self.mailboxes) == 1:
            (mailbox,) = self.mailboxes.values()
            return mailbox.find(self.tokens)
        return [found for mailbox in self.mailboxes.values() for found in mailbox.find(self.tokens)]

    def expected(self) -> float:
        """Expected number of accepted tokens of the best draft at hand."""
        best = 0.0
        for mailbox in self.mailboxes.values():
            if (expected := mailbox.expected(self.tokens)) > best:
                best = expected
        return best

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append the tokens of a step, and rate the drafts by them.

        Raises:
            OutriderError: the answer's grammar forbids one of them, or cannot go on.
        """
        if self.grammar is not None:
            self.grammar.commit(tokens)
        if self._words is not None:
            self._words.commit(tokens)
        for mailbox in self.mailboxes.values():
            mailbox.learn(self.tokens, tokens, self.most_credited)
        self.tokens.extend(tokens)
        if not self.message.plan.sources:
            # Nobody will ever draft for it.
            return
        self.repetition.commit(tokens)
        self.prefixes.commit(len(self.tokens), tokens)
        for mailbox in self.mailboxes.values():
            mailbox.drop_old()

    def take_tree(self, probabilities: Callable[[TokenTree], list[float]]) -> TokenTree:
        """The tree that the coming step may verify: the drafts of all origins, merged and pruned.

        Args:
            probabilities: gives for each node of a tree the probability that the target accepts the path to it.
        """
        if not self.mailboxes and self.grammar is None:
            return EMPTY_TREE
        # The last token of the answer needs no row: nothing is chosen after it.
        max_depth = self.full_at - len(self.tokens) - 1
        at_hand = self.drafts()
        if self.ordinary and len(at_hand) == 1 and not at_hand[0].tree.proposals:
            # Mostly it is the only one, and small enough.
            tree = at_hand[0].tree
            nodes = len(tree.tokens)
            if nodes <= self.max_nodes and nodes <= max_depth:
                return tree if nodes else EMPTY_TREE
        trees = [found.tree for found in at_hand if found.tree.tokens]
        if self.message.plan.acceptance == "rejection":
            # Pruning sampled tokens by their values would bias rejection sampling; dropping a whole tree for its size does
            # not. A tree's tokens must come from one draft distribution, so trees are not merged: the first one is taken.
            # Where the answer's grammar demands a token, all of q lies elsewhere or on it: a plain draft does better.
            sampled = [tree for tree in trees if tree.proposals]
            if sampled and not (self.grammar is not None and self.grammar.forced(1)):
                tree = sampled[0]
                return tree if len(tree) <= self.max_nodes and len(tree) <= max_depth else EMPTY_TREE
        trees = [replace(tree, proposals=()) if tree.proposals else tree for tree in trees]
        tree = merge(trees, probabilities) if len(trees) > 1 else trees[0] if trees else EMPTY_TREE
        if self.grammar is not None and self.max_nodes:
            with self.grammar.timed():
                tree = within_grammar(tree, self.grammar, self.max_nodes)
        if not len(tree):
            return EMPTY_TREE
        if fits(tree, self.max_nodes, max_depth):
            return tree
        return prune(tree, self.max_nodes, max_depth, probabilities(tree))

    def take_ends(self, tree: TokenTree, budget: Budget, prices: Prices | None) -> tuple[int, ...]:
        """The nodes of the coming pass's tree, and ``ROOT``, that have streams in it.

        Args:
            prices: None where time does not count.
        """
        streams = self.streams
        if streams is None:
            return ()
        if not any(mailbox.pace.expects for mailbox in self.mailboxes.values()):
            # Nobody would draft from them.
            self.without_streams += 1
            return ()
        chances = budget.probabilities(tree)
        for probe in tree.probes:
            chances[probe] = 0.0
        source = stream_source(self.sources)
        tokens = max((mailbox.worth(source).of(late=False) for mailbox in self.mailboxes.values()), default=0.0)
        ends = choose_ends(tree, chances, streams, tokens, prices)
        if not ends and self.without_streams >= EXPLORE_EVERY:
            ends = choose_ends(tree, chances, streams, tokens, None)[:1]
        self.without_streams = 0 if ends else self.without_streams + 1
        return ends

    def note_choice(self, drafted: int, chosen: int) -> None:
        """Remember how many of a draft's nodes the budget chose.

        Args:
            drafted: nodes of the draft.
            chosen: nodes that the budget chose.
        """
        if drafted:
            counted = self.max_nodes if chosen == drafted else chosen
            self._chosen.append(counted)
            # None is more.
            self.most_credited = counted if counted == self.max_nodes else max(self._chosen)

    def wanted_nodes(self, mailbox: Mailbox, wanted: Wanted) -> int:
        """How many nodes to ask for. Nodes that will not be verified only cost drafting time.

        Drafts sent ahead may be as large as allowed: no step waits for them, and what remains of a large tree serves the
        next step.
        """
        if mailbox.ahead or self.by_paper:
            return self.max_nodes
        most = self.max_nodes if self.max_nodes < wanted.nodes else wanted.nodes
        usual = 2 * self.most_credited if 2 * self.most_credited > _FEWEST else _FEWEST
        return most if most < usual else usual

    def report(self, mailbox: Mailbox, verdict: Verdict, wanted: Wanted, *, asks: bool) -> StepReport:
        """The message that reports a committed step to an origin and asks for the next draft.

        Args:
            asks: whether to ask for a draft.
        """
        return _make_report(
            session_id=self.id,
            committed=verdict.committed,
            length=verdict.length,
            prefix_hash=self.prefixes.hash,
            accepted_path=verdict.accepted_path,
            max_nodes=self.wanted_nodes(mailbox, wanted) if asks else 0,
            min_probability=0.0 if mailbox.ahead or self.by_paper else wanted.min_probability,
            observation=verdict.observation,
        )

    def say(self, event: Progress | Finished) -> None:
        """Queue an event; the next ``flush`` tells the consumer."""
        self.told, self.single = True, self._only_tokens
        self.events.add(event)

    def flush(self) -> None:
        """Let the consumer read the queued events."""
        self.events.wake()

    def finish(self, reason: FinishReason) -> None:
        """End the answer; the next ``flush`` delivers ``Finished``."""
        self.ended = True
        self.say(Finished(reason=reason))

    def fail(self, error: BaseException) -> None:
        """Deliver the queued events, then ``error``. Does nothing if the request has ended."""
        if not self.ended:
            self.ended = True
            self.events.add(error)
            self.events.wake()
