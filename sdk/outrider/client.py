# Made of aio.py by sdk/unasync.py: change that.
"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import TypeVar, Unpack

import grpc

from outrider import _transport
from outrider._transport import Metadata, Retry
from outrider.errors import InternalError, OutriderError, from_rpc
from outrider.requests import Message, Options, build_request, join, read_chunk, read_models
from outrider.types import Chunk, Generation, Model, Reloaded
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

_Reply = TypeVar("_Reply")


class Stream:
    """Pieces of one answer as they come. Leaving the loop early, or ``close``, cancels the request at the server.

    Attributes:
        result: the whole answer, once the stream has ended.
    """

    def __init__(self, pieces: Generator[Chunk | Generation, None]) -> None:
        self._pieces = pieces
        self.result: Generation | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        piece = next(self._pieces)
        if isinstance(piece, Generation):
            self.result = piece
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Client:
    """Talks to one Outrider server.

    Args:
        address: "host:port".
        api_key: sent with every call.
        timeout_s: longest that a call may take, unless the call says otherwise; None: no limit.
        tls: speak TLS; ``root_certificates`` (PEM) replaces the system's roots.
        retry: how often a call that failed before its first token is tried again.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        tls: bool = False,
        root_certificates: bytes | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._address, self._timeout_s, self._retry = address, timeout_s, retry or Retry()
        self._metadata = _transport.metadata(api_key)
        self._closed = False
        if tls:
            credentials = _transport.tls_credentials(root_certificates)
            self._channel = grpc.secure_channel(address, credentials, options=_transport.options_for(address))
        else:
            self._channel = grpc.insecure_channel(address, options=_transport.options_for(address))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """The whole answer to a text, a conversation (``[{"role": ..., "content": ...}]``) or token ids.

        Exactly one input is given. An option that is left out, or None, takes the server's default: for those that say how
        tokens are chosen what ``models`` lists for the model, and where that says nothing, the default named here.

        Args:
            prompt: text, tokenised as it is.
            messages: a conversation, rendered with the model's chat template.
            token_ids: token ids, used as they are.
            timeout_s: longest that the call may take, 0 included; None: as the client says.
            request_id: what the request is called in the server's logs; the server draws one where nobody says.
            traceparent: the trace that it belongs to, as in W3C Trace Context.
            model: name of a served model. Default: the only one.
            strategy: how tokens are drafted, one of the model's ``strategies``. It changes the speed, never the answer.
            sources: names of the sources that draft, in place of a strategy, such as ["lookahead", "rest"]: one tree is
                made of what exactly these say. It changes the speed, never the answer.
            num_speculative_tokens: most drafted tokens to check in one pass; 0 is plain decoding.
            acceptance: "walk" (default): a seed gives the same tokens under any strategy; or "rejection", the classic rule:
                the same distribution, but which tokens are drawn depends on the drafts.
            effort: "paper": each step waits for a draft and checks all of it, as the strategy's paper has it; "measured": as
                far as that makes the answer faster. Default: "measured" for auto and blend, "paper" for other strategies.
            drafter: name of the model that drafts, on servers with several. It changes the speed, never the answer. Default:
                a rule of the server names one, or those draft that pay.
            group: a name of your own for requests that belong together, such as attempts at one task: they draft from each
                other's answers while these are written. It changes the speed, never the answer. Default: none.
            report: "sources": say who guessed each token, in ``Chunk.origins`` and ``Generation.origins``; "trees": also
                what each pass checked, in ``passes`` of both. Default: "none".
            compare: names of up to 8 strategies; ``Generation.comparisons`` says what they would have made of the answer.
            temperature: 0 (default) always takes the likeliest token; 0.001 to 100, larger is more random.
            top_k: keep the k likeliest tokens; 0 (default): all.
            top_p: keep the likeliest tokens whose probabilities add up to this, above 0 and at most 1 (default: all).
            min_p: drop tokens whose probability is below this share of the likeliest one's; 0 (default): none.
            seed: the same seed, input and options give the same tokens. Default: drawn, and told in ``Generation.seed``.
            max_tokens: most tokens of the answer. Default: 256, or what the context has left if that is less.
            min_tokens: no stop token is chosen before so many tokens. Default: 0.
            stop: text, or up to 16 texts; the answer ends before the first one that appears.
            stop_token_ids: tokens that end the answer, besides the model's own end-of-text tokens.
            ignore_eos: go on past the model's own end-of-text tokens. Default: False.
            repetition_penalty: above 1 makes tokens of the input and the answer less likely; 0.01 to 10. Default: 1.
            presence_penalty: taken from the logit of each token that the answer holds; -2 to 2. Default: 0.
            frequency_penalty: taken for every time that the answer holds the token; -2 to 2. Default: 0.
            logit_bias: token ids to numbers from -100 to 100, which are added to their logits.
            logprobs: tell the log-probability of each token, and of so many likeliest ones beside it, at most 20.
            prompt_logprobs: the same of the input's tokens but its first, in ``Generation.prompt_logprobs``.
            ignore_generation_config: take nothing of the model's generation_config.json but its end-of-text tokens.
            structured_outputs: the form that the answer must have, such as ``{"json": schema}``; see ``StructuredOutputs``.
            allowed_token_ids: choose only these tokens.
            bad_words: texts that the answer must not hold.
            prediction: what the answer is expected to be, such as a text to be edited; "auto" and "blend" draft from it.
            cache_salt: share what was computed of prompts only with requests that have the same salt.
            priority: of the waiting requests with one API key, lower numbers go first. Default: 0.
            privacy: "strict": chunks of one size at an even pace, so that who watches the network learns less; or "none".

        Raises:
            OutriderError: see ``outrider.errors``.
        """
        with self.stream(
            prompt,
            messages=messages,
            token_ids=token_ids,
            timeout_s=timeout_s,
            request_id=request_id,
            traceparent=traceparent,
            **options,
        ) as stream:
            for _ in stream:
                pass
        if stream.result is None:
            raise InternalError("the server ended the stream without a result")
        return stream.result

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Like ``generate``, with the same arguments, piece by piece."""
        request = build_request(prompt, messages, token_ids, options)
        metadata = (*self._metadata, *_transport.named(request_id, traceparent))
        return Stream(self._pieces(request, metadata, timeout_s if timeout_s is not None else self._timeout_s))

    def models(self) -> list[Model]:
        """What the server serves.

        Raises:
            OutriderError: see ``outrider.errors``.
        """
        return read_models(self._retried(self._stub.ListModels, pb.ListModelsRequest()))

    def forget(self) -> None:
        """Delete what the server remembers of requests with this API key: answers, computed prompts, what followed what.

        Raises:
            OutriderError: see ``outrider.errors``.
        """
        self._retried(self._stub.Forget, pb.ForgetRequest())

    def reload(self, folder: str, *, running: str = "finish", within_s: float = 600.0) -> Reloaded:
        """Replace the weights that the server serves, while it serves. Needs an API key with the scope ``admin``.

        Args:
            folder: safetensors of the same model: an absolute path at the verifiers, in one of ``verifier.weights_from``.
            running: "finish": answers under way end with the old weights; "restart": those that are sent as a whole begin
                once more with the new ones, and those that are streamed end with the old ones.
            within_s: seconds that answers under way have to end; else nothing is replaced.

        Raises:
            OutriderError: nothing that is served has changed; see ``outrider.errors``.
        """
        request = pb.ReloadRequest(folder=folder, running=running, within_s=within_s)
        try:
            # Not tried again, nor given up: reading the weights takes as long as they are large.
            done = self._stub.Reload(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, self._address, closed=self._closed) from error
        return Reloaded(arithmetic=done.arithmetic, notes=tuple(done.notes))

    def pause(self, *, mode: str = "wait", within_s: float = 600.0) -> None:
        """Let the server decode nothing until ``resume``; new requests wait. Needs an API key with the scope ``admin``.

        Args:
            mode: "wait": answers under way end first; "keep": they stop between two tokens, and go on after ``resume``.
            within_s: seconds that they have to end; else nothing is paused.

        Raises:
            OutriderError: decoding goes on; see ``outrider.errors``.
        """
        try:
            # Not given up: answers take as long as they are.
            self._stub.Pause(pb.PauseRequest(mode=mode, within_s=within_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, self._address, closed=self._closed) from error

    def resume(self) -> None:
        """Let the server decode. Needs an API key with the scope ``admin``.

        Raises:
            OutriderError: see ``outrider.errors``.
        """
        self._retried(self._stub.Resume, pb.ResumeRequest())

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _retried(self, method: Callable[..., _Reply], request: object) -> _Reply:
        attempt = 1
        while True:
            try:
                return method(request, timeout=self._timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                raised = from_rpc(error, self._address, closed=self._closed)
                attempt += 1
                if (delay := self._retry.delay_before(attempt, raised)) is None:
                    raise raised from error
            time.sleep(delay)

    def _pieces(
        self, request: pb.GenerateRequest, metadata: Metadata, timeout_s: float | None
    ) -> Generator[Chunk | Generation, None]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        attempt = 1
        begun = False
        while True:
            try:
                with closing(self._attempt(request, metadata, deadline)) as pieces:
                    for piece in pieces:
                        begun = True
                        yield piece
                return
            except OutriderError as error:
                attempt += 1
                delay = None if begun else self._retry.delay_before(attempt, error)
                if delay is None or (deadline is not None and time.monotonic() + delay > deadline):
                    raise
            time.sleep(delay)

    def _attempt(
        self, request: pb.GenerateRequest, metadata: Metadata, deadline: float | None
    ) -> Generator[Chunk | Generation, None]:
        chunks: list[Chunk] = []
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        call = self._stub.Generate(request, timeout=left, metadata=metadata)
        try:
            for event in call:
                if event.WhichOneof("event") == "complete":
                    yield join(chunks, event.complete)
                    return
                chunks.append(read_chunk(event.chunk))
                yield chunks[-1]
        except grpc.RpcError as error:
            raise from_rpc(error, self._address, metadata, closed=self._closed) from error
        finally:
            call.cancel()
        raise InternalError("the server ended the stream without a result")
