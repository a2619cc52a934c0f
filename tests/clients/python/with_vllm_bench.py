# /// script
# dependencies = ["vllm[bench]==0.33.0"]
# [tool.uv]
# # PyTorch for CPUs will do, and none of its further kernels.
# override-dependencies = [
#   "torch==2.13.0",
#   "torchvision ; python_version < '3'",
#   "torchaudio ; python_version < '3'",
#   "torchcodec ; python_version < '3'",
#   "triton ; python_version < '3'",
#   "flashinfer-python ; python_version < '3'",
#   "humming-kernels ; python_version < '3'",
#   "nvidia-cutlass-dsl ; python_version < '3'",
#   "quack-kernels ; python_version < '3'",
#   "tilelang ; python_version < '3'",
#   "tokenspeed-mla ; python_version < '3'",
#   "tokenspeed-triton ; python_version < '3'",
#   "fastsafetensors ; python_version < '3'",
#   "instanttensor ; python_version < '3'",
#   "nccl4py ; python_version < '3'",
#   "nccl-extensions ; python_version < '3'",
#   "cuda-python ; python_version < '3'",
#   "cuda-core ; python_version < '3'",
#   "cuda-tile ; python_version < '3'",
#   "torch-c-dlpack-ext ; python_version < '3'",
#   "pynvvideocodec ; python_version < '3'",
#   "nvidia-cudnn-frontend ; python_version < '3'",
#   "nvidia-cuda-nvcc ; python_version < '3'",
#   "nvtx ; python_version < '3'",
# ]
# [tool.outrider]
# stream = "It streams always, and tells times of pieces, not the pieces: tried with `default`."
# tools = "It has none."
# structured = "It has none."
# ///
"""vLLM's `vllm bench serve`, without what it needs on GPUs, over chat completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from asked import MODEL, QUESTION, SHORT, run

FOLDER = Path(os.environ["CLIENT_FOLDER"])


def default(url):
    (FOLDER / "prompts.jsonl").write_text(json.dumps({"prompt": QUESTION}))
    command = [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai-chat", "--base-url", url,
        "--endpoint", "/v1/chat/completions", "--model", MODEL, "--skip-tokenizer-init", "--skip-chat-template",
        "--dataset-name", "custom", "--dataset-path", str(FOLDER / "prompts.jsonl"), "--num-prompts", "1",
        # Without a tokenizer it asks for one token.
        "--extra-body", json.dumps({"max_completion_tokens": SHORT}), "--temperature", "0",
        "--save-result", "--save-detailed", "--result-dir", str(FOLDER),
        "--result-filename", "told.json", "--disable-tqdm",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    told = json.loads((FOLDER / "told.json").read_text())
    assert (told["completed"], told["total_output_tokens"]) == (1, SHORT) and len(told["itls"][0]) > 2, told
    return told["generated_texts"][0]


run(default)
