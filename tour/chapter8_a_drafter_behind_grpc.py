"""Chapter 8. A drafter behind gRPC: another process, killed in the middle of an answer.

The engine does not know where its drafter is: here it gets the other form of the same link. One stream carries the messages
of all requests. Trees and token ids travel, never logits, so a draft has about a hundred bytes.

While the answer is written, the drafter's process is killed with SIGKILL. The engine notices a broken stream, decodes
without guesses, connects to the drafter that stands by, and tells it the text so far.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from rich.text import Text

from services.links.codec.drafting import encode_drafting_reply
from services.links.grpc_draft import GrpcDraftLink
from speculation.budget import FixedBudget
from speculation.messages import Draft, Finished, GenerationRequest
from speculation.tree import chain
from speculation.types import Plan, SamplingParams
from tour.chapter1_plain_decoding import CODE
from tour.chapter2_a_guess_checked import check_same
from tour.chapter5_merging_sources import COLOURS
from tour.chapter7_a_drafter_that_lies import PLAIN, ask, decoding
from tour.model import Model, console, open_model, say

LENGTH, NODES, KILLED_AT = 96, 8, 32
BLEND = Plan(strategy="blend", sources=("suffix", "recycling"), max_nodes=NODES, observe_top_k=8)

# All that a drafter's process runs: the service, on a free port of the loopback interface.
DRAFTER = """
import asyncio
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.grpc_draft import serve_drafter

async def run():
    server, port = await serve_drafter(DrafterService(DrafterConfig()), "127.0.0.1:0")
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(run())
"""


class Drafters:
    """Drafters in processes of their own; the first one answers, the others stand by."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._ports: list[str] = []

    async def start(self, count: int) -> None:
        """Start them, and wait until they listen."""
        pipe = asyncio.subprocess.PIPE
        starting = [asyncio.create_subprocess_exec(sys.executable, "-c", DRAFTER, stdout=pipe) for _ in range(count)]
        self._processes = await asyncio.gather(*starting)
        for process in self._processes:
            assert process.stdout is not None
            self._ports.append((await process.stdout.readline()).decode().strip())

    async def kill(self, count: int) -> None:
        """End the first of them without a word to anyone."""
        for process in self._processes[:count]:
            process.kill()
            await process.wait()
        self._processes, self._ports = self._processes[count:], self._ports[count:]

    async def address(self) -> str:
        """Asked by the link before every attempt to connect."""
        return f"127.0.0.1:{self._ports[0]}"


async def answer_and_kill(model: Model, drafters: Drafters) -> None:
    """One answer, during which the drafter dies."""
    prompt, sampling = model.prompt(CODE), SamplingParams(max_tokens=LENGTH)
    request = GenerationRequest(request_id="tour", prompt=prompt, sampling=sampling, plan=BLEND)
    tokens, shown, killed = list[int](), Text(), False
    async with decoding(model, GrpcDraftLink(drafters.address), FixedBudget(max_nodes=NODES)) as loop:
        async for step in loop.generate(request):
            if isinstance(step, Finished):
                break
            for token, source in zip(step.token_ids, (*step.accepted_sources, ""), strict=False):
                shown.append(model.text([token]), style=COLOURS.get(source, ""))
            # A bar ends each pass; a red one, if nothing had been guessed.
            shown.append("|", style="dim" if step.num_drafted else "red")
            tokens += step.token_ids
            if len(tokens) >= KILLED_AT and not killed:
                killed = True
                await drafters.kill(1)
                shown.append(" ☠ ", style="bold red")
        plain = await ask(loop, prompt, PLAIN, sampling)
    console.print(shown)
    check_same(tokens, [token for step in plain for token in step.token_ids])
    console.print(f"\n☠: the drafter was killed; red bars: no guesses. {len(tokens)} tokens, those of plain decoding.\n")


async def tell(model: Model) -> None:
    draft, drafters = chain(range(1000, 1000 + NODES), "suffix"), Drafters()
    size = encode_drafting_reply(Draft(session_id="tour", base_length=100, base_hash=2**60, tree=draft)).ByteSize()
    console.print(f"A draft of {NODES} nodes has {size} bytes on the wire. Starting two drafters.\n")
    try:
        await drafters.start(2)
        await answer_and_kill(model, drafters)
    finally:
        await drafters.kill(2)


def main() -> None:
    model = open_model()
    logging.disable(logging.WARNING)
    asyncio.run(tell(model))
    logging.disable(logging.NOTSET)
    say("""
        [bold]Try[/bold] the whole service: `outrider serve` starts router, drafter and verifier as processes of their own
        on Ray. Ask it something with `outrider chat`, and kill processes while it answers. docs/request_lifecycle.md names
        the file and function of every step that you have seen here.
    """)


if __name__ == "__main__":
    main()
