"""Settings: YAML file < environment (``OUTRIDER_VERIFIER__DTYPE=bfloat16``) < command line. Unknown keys are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import override

from cluster.settings.components import DrafterSettings, RetrievalSettings, RouterSettings, VerifierSettings
from cluster.settings.operating import LoggingSettings, MetricsSettings, TracingSettings
from cluster.settings.placement import ClusterSettings
from cluster.settings.server import ServerSettings
from cluster.settings.unknown import unknown
from services.machine.processor import cache_folder
from services.wrong_values import allowed
from services.yaml_text import read_yaml
from speculation.errors import ConfigurationError, quoted

# Not a setting: the API key that the command line sends as a client.
API_KEY_VARIABLE = "OUTRIDER_API_KEY"


_PREFIX = "OUTRIDER_"
# Settings that no command line may hold and no message may show, and where they may be set.
_SECRETS = {
    "internal_token": f"{_PREFIX}INTERNAL_TOKEN, or internal_token_file",
    "retrieval.redis_password": f"{_PREFIX}RETRIEVAL__REDIS_PASSWORD",
    "retrieval.answers_key": f"{_PREFIX}RETRIEVAL__ANSWERS_KEY",
    "router.learning_redis_password": f"{_PREFIX}ROUTER__LEARNING_REDIS_PASSWORD",
    "server.stored_responses_redis_password": f"{_PREFIX}SERVER__STORED_RESPONSES_REDIS_PASSWORD",
}


class Settings(BaseSettings):
    """All settings of a service."""

    model_config = SettingsConfigDict(
        extra="forbid", env_prefix=_PREFIX, env_nested_delimiter="__", frozen=True, protected_namespaces=()
    )

    model: str = Field(
        "smollm2-135m-instruct", description="target model: a Hugging Face name, a folder, a GGUF file, or the built-in one"
    )
    internal_token: str | None = Field(
        None,
        min_length=16,
        description="secret that the components share, to be set in the environment or a file alone; null: drawn at start",
    )
    internal_token_file: Path | None = Field(None, description="file that holds internal_token, such as a mounted secret")
    cache_dir: Path = Field(
        default_factory=cache_folder,
        description="folder of models, indexes and measurements, all of which can be made again",
    )
    drafting_dir: Path | None = Field(
        None,
        description="folder in which drafters and retrieval services write: fetched indexes, how good the sources' drafts "
        "were; null: cache_dir, which they otherwise only read",
    )
    cluster: ClusterSettings = ClusterSettings()
    server: ServerSettings = ServerSettings()
    router: RouterSettings = RouterSettings()
    verifier: VerifierSettings = VerifierSettings()
    drafter: DrafterSettings = DrafterSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    logging: LoggingSettings = LoggingSettings()

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values that ``load`` passes: it reads file, environment and flags itself."""
        return (init_settings,)


def load(
    path: Path | None = None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    over: Mapping[str, Any] | None = None,
) -> Settings:
    """Read all settings; later ones go before earlier ones.

    Args:
        path: a YAML file.
        environ: the environment; None: this process's own.
        over: sections of settings, as in a file.
        flags: ``section.key=value`` each.

    Raises:
        ConfigurationError: the file cannot be read, a key is unknown or a value does not fit; names the file or key.
    """
    merged: dict[str, Any] = _read_file(path) if path is not None else {}
    for name, value in (os.environ if environ is None else environ).items():
        if name.startswith(_PREFIX) and name != API_KEY_VARIABLE:
            _put(merged, name.removeprefix(_PREFIX).lower().split("__"), value)
    if over:
        _check_keys(over, "given")
        merged = _merged(merged, deepcopy(dict(over)))
    for flag in flags:
        key, separator, value = flag.partition("=")
        if not separator:
            raise ConfigurationError(
                field="--set", verb="", value=flag, allowed="section.key=value, such as verifier.dtype=bfloat16"
            )
        if (secret := _secret_in(key, value)) is not None:
            raise ConfigurationError(
                f"every user of this machine could read it in the list of processes; set {_SECRETS[secret]}",
                field="--set",
                verb="",
                value=secret,
            )
        _put(merged, key.split("."), value)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _explained(error) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot read the configuration {path}: it is not UTF-8 (byte {error.start}); save it as UTF-8", about=path
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}", about=path) from error
    except ValueError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error}", about=path) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"the configuration {path} must be a mapping of sections", about=path)
    _check_keys(content, str(path))
    return content


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        both[key] = {**under, **value} if isinstance(under, dict) and isinstance(value, dict) else value
    return both


def _check_keys(content: Mapping[Any, Any], path: str) -> None:
    for section, below in content.items():
        for key in (section, *(below if isinstance(below, dict) else ())):
            # YAML reads the keys 1 and yes as a number and a boolean.
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"the configuration {path} has the key {key!r}: keys must be names of settings", about=path
                )


def _put(tree: dict[str, Any], keys: Sequence[str], value: str) -> None:
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigurationError(f"{key} is a value, not a section", field=".".join(keys))
        tree = below
    if ".".join(keys) in _SECRETS and value != "null":
        # A text, whatever it begins with, and no message may show it.
        tree[keys[-1]] = value
        return
    try:
        tree[keys[-1]] = read_yaml(value) if value[:1] in ("[", "{") or value == "null" else value
    except ValueError as error:
        key = ".".join(keys)
        shown = "hidden" if _is_secret(key) else quoted(value)
        raise ConfigurationError("not a YAML list or mapping", field=key, value=shown) from error


def _secret_in(key: str, value: str) -> str | None:
    """The secret that a flag sets, by its own name or within a section; None: it sets none."""
    within = (each for each in _SECRETS if each.startswith(f"{key}.") and each.rpartition(".")[2] in value)
    return key if key in _SECRETS else next(within, None)


def _is_secret(key: str) -> bool:
    """Whether the value of a setting, or a section that should be no text, is or may hold what no message may show."""
    return any(secret == key or secret.startswith(f"{key}.") for secret in _SECRETS)


def _explained(error: ValidationError) -> ConfigurationError:
    """One refusal for all settings that are wrong."""
    refusals = [_refused(problem) for problem in error.errors()]
    if len(refusals) == 1:
        return refusals[0]
    return ConfigurationError("; ".join(map(str, refusals)), about=", ".join(each.field for each in refusals))


def _refused(problem: ErrorDetails) -> ConfigurationError:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return ConfigurationError(unknown(Settings, problem["loc"]), about=key)
    why = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):
        # Settings of a section that do not go together: it begins with the name of the first.
        return ConfigurationError(f"{key}.{why}", about=key)
    value = "unset" if problem["type"] == "missing" else "hidden" if _is_secret(key) else quoted(problem["input"])
    wanted = allowed(problem)
    return ConfigurationError("" if wanted else why, field=key, value=value, allowed=wanted)
