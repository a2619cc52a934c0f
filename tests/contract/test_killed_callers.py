"""A router that is killed leaves nothing behind at a verifier that it called over gRPC."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from services.links.grpc_verifier import serve_verifier
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from speculation.reloads import ReloadOrder
from tests.running.patience import PATIENCE_S

CALLER = """
import sys, grpc
from outrider.internal.v1 import verification_pb2 as pb, verification_pb2_grpc
stub = verification_pb2_grpc.VerificationServiceStub(grpc.insecure_channel(sys.argv[1]))
request = pb.VerifyRequest(request_id="r", prompt_token_ids=[1])
request.sampling.CopyFrom(pb.SamplingParams(top_p=1, max_tokens=9, repetition_penalty=1))
request.plan.strategy, request.plan.acceptance = "autoregressive", "walk"
for _ in stub.Verify(request):
    print("came", flush=True)
"""


class Endless:
    """Implements the part of ``VerifierPort`` that is called: answers for ever, once a moment."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        try:
            while True:
                yield Progress(token_ids=(1,))
                await asyncio.sleep(0.05)
        finally:
            self.ended.set()

    async def describe(self) -> VerifierCard:
        raise NotImplementedError

    async def forget(self, tenant: str) -> None:
        raise NotImplementedError

    async def reload(self, order: ReloadOrder) -> str:
        raise NotImplementedError


async def test_a_killed_caller_ends_its_stream() -> None:
    verifier = Endless()
    server, port = await serve_verifier(verifier, "127.0.0.1:0")
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALLER, f"127.0.0.1:{port}", stdout=asyncio.subprocess.PIPE
    )
    assert caller.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await caller.stdout.readline() == b"came\n"
        assert not verifier.ended.is_set()
        caller.kill()
        await verifier.ended.wait()
    await caller.wait()
    await server.stop(None)
