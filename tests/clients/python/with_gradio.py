# /// script
# dependencies = ["gradio==6.31.0", "openai==3.57.0"]
# [tool.outrider]
# tools = "Its chat has none."
# structured = "Its chat has none."
# ///
"""Gradio's chat (`load_chat`), over chat completions."""

from itertools import pairwise

import gradio
from asked import KEY, MODEL, QUESTION, run
from gradio_client import Client


def _pieces(url, streaming):
    chat = gradio.load_chat(f"{url}/v1", model=MODEL, token=KEY, file_types=None, streaming=streaming, api_name="chat")
    _, where, _ = chat.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    asked = Client(where, verbose=False).submit(QUESTION, api_name="/chat")
    return [asked.result()] if not streaming else list(asked)


def default(url):
    return _pieces(url, False)[0]


def stream(url):
    texts = ["", *_pieces(url, True)]
    return [text[len(before) :] for before, text in pairwise(texts)]


run(default, stream)
