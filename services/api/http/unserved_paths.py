"""Paths that are not served here, and what to use instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.wrong_values import did_you_mean

_TEXT = "Outrider generates text only"
_BESIDE = {
    "embeddings": "run a server of embedding models beside it",
    "reranking": "run a server of reranking models beside it, or ask a model of text for a verdict",
    "audio": "run a server of speech models beside it",
    "images": "run a server of image models beside it",
    "moderations": "ask a guard model over /v1/chat/completions",
    "classification": "run a server of such models beside it, or ask a model of text for a verdict",
}
_PATHS = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/moderations": "moderations",
    "/v1/score": "reranking",
    "/score": "reranking",
    "/encode": "embeddings",
    "/embedding": "embeddings",
    "/pooling": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/reranking": "reranking",
    "/v1/reranking": "reranking",
    "/classify": "classification",
    "/v1/classify": "classification",
}
_COMPLETIONS, _CHAT = "POST /v1/completions continues a text", "POST /v1/chat/completions answers a conversation"
_MODELS, _STATUS = "GET /v1/models says what is served", "GET /v1/outrider/status says what it does"
_TOKENS, _TEXT_OF = "POST /tokenize gives the tokens of a text", "POST /detokenize gives the text of tokens"
_LEAVE = "an answer ends when its client closes the connection; POST /v1/responses/{id}/cancel ends a response"
_ONE_MODEL = "the model is loaded when the server starts (--model); GET /v1/models says which"
_ADAPTERS = "POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter change adapters; requests name one as their model"
_PROFILE = "`outrider top` and `outrider bench host` say where the time goes"
_AZURE = "OpenAI's client (not Azure's) with base_url=http://HOST:PORT/v1 is answered"
_WEIGHTS = "POST /update_weights_from_disk takes new weights from a folder"
_NO_NEED = "computed prompts belong to the weights that made them, and `outrider forget` deletes those of a key"
_NO_SESSIONS = "prompts are cached for each API key by themselves, as long as there is room"
_ASK_AGAIN = "ask for each answer by itself, as many at once as you like"
_FILES = "`outrider run-batch` asks for each line of a file, some at once"
_PARTS = "POST /v1/chat/completions tells calls and thoughts apart by itself"
_SPOKEN = "clients of OpenAI's and Anthropic's APIs are answered (/v1)"
_INDEX = "`outrider index publish` puts an index in place while serving"
_OPENAI_S = "conversations are kept by /v1/responses alone (previous_response_id)"
# Paths of vLLM, SGLang, TensorRT-LLM, llama-server, text-generation-inference, LM Studio, Ollama: what does the same here.
ELSEWHERE: Mapping[str, str] = {
    "/v1": "clients of OpenAI's begin with it (base_url); GET /v1/models says what is served, GET /docs lists every path",
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/completions": _COMPLETIONS,
    "/chat/completions": _CHAT,
    "/invocations": _CHAT,
    "/inference/v1/generate": _COMPLETIONS,
    "/api/pull": _ONE_MODEL,
    "/api/push": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
    "/api/create": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
    "/api/v1/chat": _CHAT,
    "/api/v1/models": _MODELS,
    "/api/v1/models/load": _ONE_MODEL,
    "/api/v1/models/unload": _ONE_MODEL,
    "/api/v1/models/download": _ONE_MODEL,
    "/api/v0/completions": _COMPLETIONS,
    "/api/v0/chat/completions": _CHAT,
    "/v1/engines": _MODELS,
    "/v1/chat/completions/batch": _ASK_AGAIN,
    "/v1/completions/render": _TOKENS,
    "/generative_scoring": "POST /v1/completions tells log-probabilities of prompts (prompt_logprobs)",
    "/v2/chat": _SPOKEN,
    "/vertex_generate": _CHAT,
    "/parse_function_call": _PARTS,
    "/separate_reasoning": _PARTS,
    "/open_session": _NO_SESSIONS,
    "/close_session": _NO_SESSIONS,
    "/load_lora_adapter": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/get_weights_by_name": "weights do not leave the server",
    "/models/load": _ONE_MODEL,
    "/models/unload": _ONE_MODEL,
    "/models": _MODELS,
    "/v1/model/info": _MODELS,
    "/api/v0/models": _MODELS,
    "/v1/loads": _STATUS,
    "/perf_metrics": "every answer has metrics",
    "/prometheus/metrics": "GET /metrics has them, at the ops port or with server.metrics",
    "/v1/tokenize": _TOKENS,
    "/v1/detokenize": _TEXT_OF,
    "/chat_tokenize": "POST /tokenize takes messages, too",
    "/lora-adapters": _ADAPTERS,
    "/abort_request": _LEAVE,
    "/abort_requests": _LEAVE,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/get_weight_version": "system_fingerprint of an answer names its weights",
    "/weight_version": "system_fingerprint of an answer names its weights",
    "/v1/health": "GET /health answers while this process lives",
    "/info": _MODELS,
    "/get_model_info": _MODELS,
    "/model_info": _MODELS,
    "/props": _MODELS,
    "/server_info": _STATUS,
    "/get_server_info": _STATUS,
    "/get_load": _STATUS,
    "/load": _STATUS,
    "/slots": _STATUS,
    "/apply-template": "POST /v1/chat/completions/render shows what a template makes",
    "/ping": "GET /health answers while this process lives",
    "/health_generate": "GET /ready answers while requests would be answered",
    "/healthz": "GET /health answers while this process lives",
    "/readyz": "GET /ready answers while requests would be answered",
    "/flush_cache": _NO_NEED,
    "/reset_prefix_cache": _NO_NEED,
    "/reset_mm_cache": "the model reads text alone",
    "/reset_encoder_cache": "the model reads text alone",
    "/sleep": "POST /pause stops decoding and keeps the weights",
    "/wake_up": "POST /resume goes on",
    "/is_sleeping": "GET /is_paused says whether it is paused",
    "/release_memory_occupation": "POST /pause stops decoding and keeps the weights",
    "/resume_memory_occupation": "POST /resume goes on",
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/init_weights_update_group": _WEIGHTS,
    "/collective_rpc": _WEIGHTS,
    "/add_external_corpus": _INDEX,
    "/remove_external_corpus": _INDEX,
    "/list_external_corpora": _INDEX,
    "/v1/responses/compact": "conversations are kept whole",
}
# Only asked for where the setting has not put it there.
_METRICS = "there is no /metrics at this port: set server.metrics: true, or ask the ops port (server.ops_port)"
_FOLDERS = {"/v1/audio": "audio", "/v1/images": "images"}
_OTHER_FOLDERS = {
    "/v1/batches": _FILES,
    "/v1/messages/batches": _FILES,
    "/v1/files": _FILES,
    "/v1/uploads": _FILES,
    "/v1/assistants": _OPENAI_S,
    "/v1/threads": _OPENAI_S,
    "/v1/conversations": _OPENAI_S,
    "/v1/vector_stores": "texts are put into the prompt by who asks",
    "/v1/containers": "functions are called by who asks",
    "/v1/evals": "`outrider bench` measures, and prompts are asked over /v1/chat/completions",
    "/v1/fine_tuning": "adapters and weights are trained elsewhere; POST /v1/load_lora_adapter loads one",
    "/v1/chat/completions": "answers of chats are not stored; /v1/responses stores its own",
    "/v1/organization": "the audit log (server.audit_log) and GET /metrics tell what keys and services have used",
    "/v1/skills": "functions are called by who asks",
    "/v1beta": _SPOKEN,
    "/v2/models": "POST /v1/completions continues a text; GET /v2/health/ready says whether it would be answered",
    "/slots": _STATUS,
    "/api/blobs": _ONE_MODEL,
    "/v1/realtime": f"{_TEXT}, and streams it as events",
    "/v1/videos": _TEXT,
    "/openai": _AZURE,
}


def instead_of(path: str) -> str | None:
    """What to say of a path; None: it is none of these."""
    if path == "/metrics":
        return _METRICS
    if path in ELSEWHERE:
        return f"there is no {path}: {ELSEWHERE[path]}"
    for folder, said in _OTHER_FOLDERS.items():
        if f"{path}/".startswith(f"{folder}/"):
            return f"there is no {path}: {said}"
    what = _PATHS.get(path) or next((what for folder, what in _FOLDERS.items() if path.startswith(f"{folder}/")), None)
    return None if what is None else f"there is no {path}: {_TEXT}; for {what}, {_BESIDE[what]}"


def unknown_path(path: str, served: Sequence[str]) -> str:
    """What to say of a path that nobody knows: which is meant, if one is near, and which there are."""
    # A base URL with /v1 before a path with /v1, a slash at the end, another case.
    usual = re.sub(r"^(/v1)+(?=/v1/)", "", path.rstrip("/").lower())
    meant = f" (did you mean {usual}?)" if usual in served and usual != path else did_you_mean(path, served)
    return f"there is no {path}{meant}; there are {', '.join(served)}"
