"""One answer, and what it cost. Start a server first: outrider serve --in-process"""

import sys

from outrider import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS) as client:
    answer = client.generate("Once upon a time", max_tokens=64, temperature=0.7, seed=1)
    print(answer.text)
    print(answer.usage.completion_tokens, "tokens, in", answer.speculative_decoding.num_spec_steps, "passes")
