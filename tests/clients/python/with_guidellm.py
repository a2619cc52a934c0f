# /// script
# dependencies = ["guidellm==0.8.1"]
# [tool.uv]
# override-dependencies = ["torch==2.13.0"]
# [tool.outrider]
# stream = "It streams by default, and tells times of pieces, not the pieces: tried with `default`."
# tools = "It has none."
# structured = "It has none."
# ///
"""guidellm's benchmark of one request, streamed and whole, over chat completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from asked import MODEL, QUESTION, SHORT, run

FOLDER = Path(os.environ["CLIENT_FOLDER"])


def _measured(url, streams):
    """What it tells of the request."""
    (FOLDER / "prompts.jsonl").write_text(json.dumps({"prompt": QUESTION}))
    told = FOLDER / "told.json"
    told.unlink(missing_ok=True)
    backend = f"kind=openai_http,target={url},model={MODEL},max_tokens={SHORT},stream={streams},extras.body.temperature=0"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--backend", backend, "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=1", "--data", f"kind=json_file,path={FOLDER / 'prompts.jsonl'}",
        "--output", f"kind=json,path={told}", "--disable-console-interactive",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    (benchmark,) = json.loads(told.read_text())["benchmarks"]
    (request,) = benchmark["requests"]["successful"]
    return request


def default(url):
    streamed, whole = _measured(url, "true"), _measured(url, "false")
    assert streamed["output"] == whole["output"] and streamed["info"]["timings"]["token_iterations"] > 2, (streamed, whole)
    return whole["output"]


run(default)
