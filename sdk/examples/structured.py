"""An answer that must be JSON of a given form."""

import json
import sys

from outrider import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
}

with Client(ADDRESS) as client:
    answer = client.generate(
        messages=[{"role": "user", "content": "Name a city and its country."}],
        structured_outputs={"json": SCHEMA},
        max_tokens=100,
    )
    if answer.finish_reason == "stop":
        print(json.loads(answer.text))
    else:
        print("cut off:", answer.text)
