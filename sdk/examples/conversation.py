"""A conversation, streamed. Each answer is sent back with the next question."""

import sys

from outrider import Client, Message

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTIONS = ("Name three rivers.", "Which of them is the longest?")

with Client(ADDRESS) as client:
    messages: list[Message] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        text = ""
        with client.stream(messages=messages, max_tokens=64) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                text += chunk.text
        print()
        messages.append({"role": "assistant", "content": text})
