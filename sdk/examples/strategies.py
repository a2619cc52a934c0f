"""The same answer by several strategies: equal tokens, different numbers of passes."""

import sys

from outrider import Client, InvalidArgument

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
PROMPT = [{"role": "user", "content": "Write a Python class Point with fields x and y, and __add__ and __sub__."}]

with Client(ADDRESS) as client:
    answers = {}
    for strategy in ("autoregressive", "prompt_lookup", "blend", "auto"):
        try:
            answers[strategy] = client.generate(messages=PROMPT, strategy=strategy, max_tokens=96, seed=1)
        except InvalidArgument as error:
            print(f"{strategy}: {error.field} must be {error.allowed}")
            continue
        passes = answers[strategy].speculative_decoding.num_spec_steps
        print(f"{strategy}: {len(answers[strategy].token_ids)} tokens in {passes} passes")
    print("the same tokens:", len({answer.token_ids for answer in answers.values()}) == 1)
