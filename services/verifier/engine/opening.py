"""What a drafter is told when a session of a request begins, or begins anew."""

from __future__ import annotations

from services.verifier.engine.live_request import LiveRequest
from speculation.messages import DraftNoise, OpenSession


def opening(request: LiveRequest, sources: tuple[str, ...], *, trusted: bool, asks: bool) -> OpenSession:
    """The message that opens a drafter's session with ``sources``, from the tokens committed so far.

    Args:
        trusted: whether the drafter may know the noise of the request's choices.
        asks: whether to ask for a first draft.
    """
    message, sampling = request.message, request.message.sampling
    rejection = message.plan.acceptance == "rejection"
    noise = None
    # Under rejection, a drafter that knows the noise could make its drafts be accepted more often than they should.
    if trusted and sampling.temperature and not rejection:
        noise = DraftNoise(seed=sampling.seed, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    return OpenSession(
        session_id=request.id,
        tokens=tuple(request.tokens),
        prompt_length=len(message.prompt),
        sources=sources,
        max_nodes=request.max_nodes if asks else 0,
        temperature=sampling.temperature,
        noise=noise,
        sampled=rejection and sampling.temperature > 0,
        # What is learnt from it would be shared with requests of another salt, or kept though its tenant was forgotten.
        tenant=request.tenant if request.tenant == message.tenant and not message.cache_salt else None,
        traceparent=message.traceparent,
        prediction=message.prediction,
        group=message.group,
        adapter=message.adapter,
    )
