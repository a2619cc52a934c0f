"""Flags of vLLM, SGLang and llama-server: what is said in their place here, so that nobody has to look each of them up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from typer.core import TyperCommand
from typing_extensions import override

from cluster.checks.host import count_gpus
from speculation.errors import ConfigurationError

# The setting that takes the flag's value as it is.
SETTINGS: Mapping[str, str] = {
    "--alias": "server.served_model_name",
    "--allowed-origins": "server.cors_origins",
    "--chunked-prefill-size": "verifier.max_batched_tokens",
    "--context-length": "verifier.max_model_len",
    "--ctx-size": "verifier.max_model_len",
    "--data-parallel-size": "verifier.replicas",
    "--device": "verifier.device",
    "--download-dir": "cache_dir",
    "--dp-size": "verifier.replicas",
    "--draft-max": "router.num_speculative_tokens",
    "--dtype": "verifier.dtype",
    "--generation-config": "verifier.generation_config",
    "--gpu-memory-utilization": "verifier.gpu_memory_utilization",
    "--kv-cache-dtype": "verifier.kv_cache_dtype",
    "--log-level": "logging.level",
    "--lora-modules": "verifier.lora_modules",
    "--lora-paths": "verifier.lora_modules",
    "--mamba-block-size": "verifier.mamba_block_size",
    "--max-model-len": "verifier.max_model_len",
    "--max-num-batched-tokens": "verifier.max_batched_tokens",
    "--max-num-seqs": "verifier.max_num_seqs",
    "--max-queued-requests": "verifier.max_waiting",
    "--max-running-requests": "verifier.max_num_seqs",
    "--max-total-tokens": "verifier.kv_cache_tokens",
    "--mem-fraction-static": "verifier.gpu_memory_utilization",
    "--model-draft": "drafter.models",
    "--otlp-traces-endpoint": "tracing.otlp_endpoint",
    "--override-generation-config": "verifier.override_generation_config",
    "--parallel": "verifier.max_num_seqs",
    "--pipeline-parallel-size": "verifier.stages",
    "--pp-size": "verifier.stages",
    "--sampling-defaults": "verifier.generation_config",
    "--served-model-name": "server.served_model_name",
    "--spec-draft-n-max": "router.num_speculative_tokens",
    "--speculative-draft-model-path": "drafter.models",
    "--speculative-eagle-topk": "drafter.speculative_eagle_topk",
    "--speculative-num-draft-tokens": "router.num_speculative_tokens",
    "--speculative-num-steps": "drafter.speculative_num_steps",
    "--ssl-certfile": "server.tls_certificate",
    "--ssl-keyfile": "server.tls_key",
    "--tensor-parallel-size": "verifier.tensor_parallel_size",
    "--tp": "verifier.tensor_parallel_size",
    "--tp-size": "verifier.tensor_parallel_size",
    "--uno-lora-path": "drafter.models",
    "-c": "verifier.max_model_len",
    "-dp": "verifier.replicas",
    "-md": "drafter.models",
    "-np": "verifier.max_num_seqs",
    "-pp": "verifier.stages",
    "-tp": "verifier.tensor_parallel_size",
}
# Settings that take a list or a mapping, of which a flag names one.
_LISTS = {"drafter.models", "server.cors_origins", "server.served_model_name"}
# Those whose flags may name several, one word each.
_SEVERAL = {"server.served_model_name", "verifier.lora_modules"}
# Flags without a value, and the setting that they are.
SWITCHES: Mapping[str, str] = {
    "--disable-radix-cache": "verifier.enable_prefix_caching=false",
    "--enable-metrics": "server.metrics=true",
    "--enable-prefix-caching": "verifier.enable_prefix_caching=true",
    "--no-enable-prefix-caching": "verifier.enable_prefix_caching=false",
    "--speculative-use-rejection-sampling": "router.acceptance=rejection",
}
# What has no setting, and why.
UNNEEDED: Mapping[str, str] = {
    "--admin-api-key": "`outrider new-key` makes one, for server.keys_file, whose scopes may have admin",
    "--api-key": "`outrider new-key` makes one, for server.keys_file",
    "--async-scheduling": "the next pass is laid out while one runs, always",
    "--block-size": "blocks of 64 tokens, always",
    "--chat-template": "it is read from the model's folder (chat_template.jinja)",
    "--decoupled-spec-bind-endpoint": "`outrider draft` runs a drafter elsewhere, for drafter.address",
    "--decoupled-spec-connect-endpoints": "`outrider draft` runs a drafter elsewhere, for drafter.address",
    "--decoupled-spec-role": "`outrider draft` runs a drafter elsewhere, for drafter.address",
    "--disable-log-requests": "prompts and answers are never logged",
    "--disable-log-stats": "numbers are metrics, not lines of the log",
    "--draft-min": "a step drafts as little as pays",
    "--enable-auto-tool-choice": "the form of calls is found by the chat template",
    "--enable-chunked-prefill": "prompts are always read in chunks",
    "--enable-deterministic-inference": "bits never depend on what shares a pass, in float32 and int8 on a CPU",
    "--enable-lora": "verifier.lora_modules or verifier.lora_folders say it",
    "--enable-trace": "tracing.otlp_endpoint says it",
    "--enforce-eager": "passes are captured on GPUs alone, where that is possible",
    "--grammar-backend": "llguidance, always",
    "--guided-decoding-backend": "llguidance, always",
    "--load-format": "it is read from the files",
    "--max-cpu-loras": "all adapters are held",
    "--max-lora-rank": "any rank up to 256",
    "--max-loras": "all adapters are held",
    "--n-gpu-layers": "verifier.device=cuda puts all layers on a GPU",
    "--per-request-spec-decode-metrics": "each answer has them",
    "--quantization": "it is read from the checkpoint",
    "--reasoning-parser": "server.reasoning finds it by the chat template",
    "--revision": "fetch that revision, and name its folder as --model",
    "--scheduling-policy": "fair between tenants, and by each request's priority",
    "--seed": "each request names its own",
    "--spec-draft-n-min": "a step drafts as little as pays",
    "--spec-draft-p-min": "drafter.stop_policy=confidence and drafter.assistant_confidence_threshold say it",
    "--spec-synth-len": "`outrider replay` and `outrider bench sizes` say what drafts would bring",
    "--spec-synth-rates": "`outrider replay` and `outrider bench sizes` say what drafts would bring",
    "--speculative-accept-threshold-acc": "no token is accepted that plain decoding would not write",
    "--speculative-accept-threshold-single": "no token is accepted that plain decoding would not write",
    "--speculative-adaptive": "how much is drafted follows the load by itself (verifier.budget)",
    "--speculative-adaptive-config": "how much is drafted follows the load by itself (verifier.budget)",
    "--speculative-ngram-external-corpus-path": "`outrider index build` makes an index of texts, for retrieval.index",
    "--speculative-token-map": "a head's draft vocabulary is read from its own file",
    "--structured-outputs-config": "llguidance, always",
    "--swap-space": "a request that gives way is computed again, with the same tokens",
    "--tokenizer": "it is read from the model's folder",
    "--tool-call-parser": "the form of calls is found by the chat template",
    "--trust-remote-code": "code of models is never run",
}
# Those of them that take no value.
_BARE = {
    "--async-scheduling", "--disable-log-requests", "--disable-log-stats", "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-deterministic-inference", "--enable-lora", "--enable-trace", "--enforce-eager", "--speculative-adaptive",
    "--trust-remote-code",
}  # fmt: skip
STRATEGIES: Mapping[str, str] = {
    "dflash": "dflash", "draft_model": "draft_model", "dspark": "dflash", "eagle": "eagle", "eagle3": "eagle3",
    "frozen_kv_mtp": "mtp", "medusa": "medusa", "mtp": "mtp", "nextn": "mtp", "ngram": "prompt_lookup", "peagle": "peagle",
    "standalone": "draft_model", "suffix": "suffix", "uno": "uno",
    # llama-server's.
    "draft-dflash": "dflash", "draft-dspark": "dflash", "draft-eagle3": "eagle3", "draft-mtp": "mtp",
    "draft-simple": "draft_model", "ngram-cache": "suffix", "ngram-map-k": "prompt_lookup", "ngram-map-k4v": "prompt_lookup",
    "ngram-mod": "suffix", "ngram-simple": "prompt_lookup",
}  # fmt: skip
_MODEL = ("--model-path", "-m")
_SPECULATION, _ALGORITHM, _TYPES = "--speculative-config", "--speculative-algorithm", "--spec-type"
KNOWN = {*SETTINGS, *SWITCHES, *UNNEEDED, *_MODEL, _SPECULATION, _ALGORITHM, _TYPES}


class SettingsCommand(TyperCommand):
    """A command that takes settings, and tells those who say them as other servers have them how they are said here."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {name: not getattr(each, "is_flag", False) for each in self.params for name in each.opts}
        refuse_flags_of_others(f"outrider {ctx.info_name}", args, takes)
        return super().parse_args(ctx, args)


def refuse_flags_of_others(command: str, args: Sequence[str], takes: Mapping[str, bool]) -> None:
    """Refuse a command line with other servers' flags, or with the model as an argument; say how it would be said here.

    Args:
        takes: the command's own options, and whether they take a value.

    Raises:
        ConfigurationError: there are some.
    """
    said, reasons, foreign = list[str](), list[str](), list[str]()
    left = list(args)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=") if word.startswith("-") else (word, "", "")
        given = [value] if equals else []
        if flag in takes:
            given = given or ([left.pop(0)] if takes[flag] and left else [])
            said += [flag, *given]
            continue
        # vLLM takes underscores as well.
        usual = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
        takes_value = flag.startswith("-") and usual not in SWITCHES and usual not in _BARE
        several = SETTINGS.get(usual) in _SEVERAL
        while takes_value and left and not left[0].startswith("-") and (several or not given):
            given.append(left.pop(0))
        # One argument is the model; of another one nobody knows what it is.
        unknown = usual not in KNOWN if flag.startswith("-") else any(not each.startswith("-") for each in foreign)
        if unknown:
            reasons.append(f"{flag}: unknown here")
            continue
        foreign.append(flag)
        new, why = _said_here(usual, given)
        if new[:1] == ["--model"] and "--model" not in takes:
            new = ["--set", f"model={new[1]}"]
        said += new
        reasons += [f"{flag}: {why}"] if why else []
    if command.endswith(" serve") and "--port" in said:
        # Theirs is HTTP's; --port is gRPC's here.
        at = said.index("--port")
        # The command line may end with it, of which the refusal is Typer's.
        said[at : at + 2] = ["--set", f"server.http_port={''.join(said[at + 1 : at + 2]) or 'PORT'}"]
    # Otherwise Typer's own refusal names what is unknown, and what is near.
    if foreign:
        said += _where(command, said)
        raise ConfigurationError(
            f"{', '.join(foreign)} {'is' if len(foreign) == 1 else 'are'} said otherwise here: {command} {shlex.join(said)}"
            + "".join(f"; {reason}" for reason in reasons)
            + " (docs/tutorials/from-vllm-or-sglang.md)",
            about=foreign[0],
        )


def _where(command: str, said: Sequence[str]) -> list[str]:
    """Where the model computes, if this machine has a GPU: the others' servers take it unless they are told not to."""
    named = {word.partition("=")[0] for word in said}
    if not command.endswith(" serve") or "verifier.device" in named or not count_gpus():
        return []
    number = [] if "verifier.dtype" in named else ["--set", "verifier.dtype=bfloat16"]
    return ["--set", "verifier.device=cuda", *number]


def _said_here(flag: str, values: Sequence[str]) -> tuple[list[str], str]:
    """The words in place of a flag, and why there are none."""
    value = values[0] if values else ""
    if not flag.startswith("-"):
        return ["--model", flag], ""
    if flag in _MODEL:
        return ["--model", value or "MODEL"], ""
    if flag in SWITCHES:
        return ["--set", SWITCHES[flag]], ""
    if flag in UNNEEDED:
        return [], UNNEEDED[flag]
    if flag == "--dtype" and value == "auto":
        return [], "float32, or what verifier.dtype names"
    if flag == _ALGORITHM:
        # SGLang's n-grams are a trie of all that came before.
        return _strategy("suffix" if value.lower() == "ngram" else value)
    if flag == _TYPES:
        # Of several kinds in one tree the blend is made.
        return (["--set", "router.strategy=blend"], "") if "," in value else _strategy(value)
    if flag == _SPECULATION:
        return _speculation(value)
    return ["--set", _setting(SETTINGS[flag], values)], ""


def _setting(name: str, values: Sequence[str]) -> str:
    if name == "verifier.lora_modules" and values and all("=" in each for each in values):
        return f"{name}={{{', '.join(each.replace('=', ': ', 1) for each in values)}}}"
    said = ", ".join(values) or "VALUE"
    return f"{name}=[{said}]" if name in _LISTS and not said.startswith("[") else f"{name}={said}"


def _strategy(name: str) -> tuple[list[str], str]:
    known = STRATEGIES.get(name.lower())
    return ["--set", f"router.strategy={known or 'auto'}"], "" if known else f"there is no {name or 'method'} here"


def _speculation(text: str) -> tuple[list[str], str]:
    """vLLM's mapping of speculation."""
    config: Any = None
    with suppress(ValueError):
        config = json.loads(text)
    if not isinstance(config, dict):
        return ["--set", "router.strategy=auto"], "it is no JSON object"
    said, why = _strategy(str(config.get("method", "")))
    if isinstance(model := config.get("model"), str):
        said += ["--set", f"drafter.models=[{model}]"]
    if isinstance(tokens := config.get("num_speculative_tokens"), int):
        said += ["--set", f"router.num_speculative_tokens={tokens}"]
    others = sorted(config.keys() - {"method", "model", "num_speculative_tokens"})
    left = f"what has no place here: {', '.join(others)}" if others else ""
    return said, ", ".join(each for each in (why, left) if each)
