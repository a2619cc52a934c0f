"""Several answers at once, with asyncio. The server decodes them together."""

import asyncio
import sys

from outrider import AsyncClient, ResourceExhausted

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


async def tale(client: AsyncClient, animal: str) -> str:
    try:
        answer = await client.generate(f"Once upon a time, a {animal}", max_tokens=32)
    except ResourceExhausted as error:
        return f"(the server is full; come again in {error.retry_after_s:.0f} s)"
    return answer.text


async def main() -> None:
    async with AsyncClient(ADDRESS) as client:
        for text in await asyncio.gather(*(tale(client, animal) for animal in ("fox", "dog", "crow"))):
            print(text)


asyncio.run(main())
