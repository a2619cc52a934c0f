"""Settings: YAML file < environment (``OUTRIDER_VERIFIER__DTYPE=bfloat16``) < command line. Unknown keys are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cluster.settings.operating import LoggingSettings, MetricsSettings, TracingSettings
from cluster.settings.placement import ClusterSettings, Placed
from cluster.settings.server import ServerSettings
from services.drafter.config import DrafterConfig
from services.links.open_sessions import SILENCE_S
from services.machine import cache_folder
from services.router.config import RouterConfig
from services.router.strategies import StrategyConfig
from services.settings import settings_of
from services.verifier.config import AttentionBackend, Dtype, Kernels, TargetConfig, Weights
from services.verifier.engine.config import LoopConfig
from speculation.errors import ConfigurationError

# Not a setting: the API key that the command line sends as a client.
API_KEY_VARIABLE = "OUTRIDER_API_KEY"


_PREFIX = "OUTRIDER_"
# Settings that no command line may hold and no message may show, and where they may be set.
_SECRETS = {
    "internal_token": f"{_PREFIX}INTERNAL_TOKEN, or internal_token_file",
    "retrieval.redis_password": f"{_PREFIX}RETRIEVAL__REDIS_PASSWORD",
}
_STRATEGY, _LOOP = StrategyConfig(), LoopConfig()
_TARGET, _ROUTER = TargetConfig(model_path=""), RouterConfig(model_path="")


class RouterSettings(Placed):
    """The public entry, and defaults for requests that leave values unset."""

    strategy: str = _STRATEGY.strategy
    num_speculative_tokens: int | None = Field(
        _STRATEGY.num_speculative_tokens,
        ge=0,
        le=512,
        description="most drafted tokens per step; None: the strategy's own number",
    )
    acceptance: Literal["walk", "rejection"] = _STRATEGY.acceptance
    migration_timeout_s: float = Field(
        _ROUTER.migration_timeout_s,
        ge=0,
        le=86_400,
        description="longest time that an answer begun waits for a verifier to come back after its own was lost",
    )


class VerifierSettings(Placed):
    """The target model and the decoding loop."""

    num_cpus: float = Field(1, ge=0, description="cores that Ray sets aside for each")
    drain_s: float = Field(
        30,
        ge=0,
        le=86_400,
        description="seconds that answers have to finish when a verifier stops; the rest moves to others",
    )
    dtype: Dtype = _TARGET.dtype
    device: str = _TARGET.device
    weights: Weights = Field(
        _TARGET.weights,
        description="on a CPU: multiply from float32 numbers, or from the same numbers in fewer bytes, as files store them",
    )
    kernels: Kernels = Field(
        _TARGET.kernels, description="what multiplies; auto: the fastest exact ones, measured at the first start"
    )
    attention_backend: AttentionBackend = Field(
        _TARGET.attention_backend,
        description="triton: our kernels for GPUs, which are exact; torch: its own; auto: triton where it takes the model",
    )
    kv_cache_tokens: int = Field(_TARGET.kv_cache_tokens, ge=64)
    max_model_len: int | None = Field(_TARGET.max_model_len, ge=2)
    threads: int | None = Field(_TARGET.threads, ge=1)
    enable_prefix_caching: bool = Field(
        _TARGET.enable_prefix_caching, description="requests of one API key share the cache of their common prefixes"
    )
    stages: int = Field(_TARGET.stages, ge=1, description="processes that the model's layers are split over")
    stage_host: str = Field(
        _TARGET.stage_host, description="address of the interface on which stages find each other; 0.0.0.0: the node's own"
    )
    pass_timeout_s: float = Field(
        _TARGET.pass_timeout_s, gt=0, le=3600, description="seconds after which a pass hangs and the target is rebuilt"
    )
    generation_config: str = Field(
        _TARGET.generation_config,
        description="auto: the model's generation_config.json gives the defaults of requests and the processing of logits; "
        "none: only its end-of-text tokens count; or a folder with another such file",
    )
    override_generation_config: dict[str, Any] = Field(
        default_factory=dict, description="fields that replace those of that file, such as {temperature: 0.7, min_p: null}"
    )
    max_num_seqs: int = Field(_LOOP.max_num_seqs, ge=1)
    max_waiting: int = Field(_LOOP.max_waiting, ge=0)
    max_wait_s: float | None = Field(
        _LOOP.max_wait_s,
        gt=0,
        le=86_400,
        description="longest wait for a seat: a request that is expected to wait longer is refused at once, one that did, "
        "then; None: any time",
    )
    max_batched_tokens: int = Field(_LOOP.max_batched_tokens, ge=1)
    draft_deadline_s: float = Field(
        _LOOP.draft_deadline_s, ge=0, le=10, description="longest wait of a step for drafts, where waiting pays"
    )
    pass_deadline_s: float = Field(
        _LOOP.pass_deadline_s, gt=0, description="seconds after which a pass far longer than others counts as hung"
    )
    kept_feature_bytes: int = Field(
        _LOOP.kept_feature_bytes,
        ge=0,
        description="most bytes of hidden states kept for drafters that join late, over all requests",
    )
    max_nodes: int = Field(64, ge=0, le=128, description="most drafted tokens of one request that a step may verify")
    budget: Literal["measured", "fixed"] = Field(
        "measured", description="measured: verify the nodes that pay at the current load; fixed: verify all nodes"
    )
    max_step_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="seconds to which prompt chunks may extend a step while others decode (budget: measured)",
    )
    check_every: int = Field(
        1000,
        ge=0,
        description="one in so many drafted answers is decoded again, plainly, while nobody waits, and compared; 0: none",
    )

    @property
    def processes(self) -> int:
        return self.stages


def _fields_of(config: type) -> dict[str, Any]:
    """The settings of a configuration class as pydantic fields."""
    return {
        mark.name: (kind, Field(default, description=mark.about, ge=mark.ge, gt=mark.gt, le=mark.le))
        for mark, kind, default in settings_of(config)
    }


# The fields are declared once, in the configuration classes of the sources.
if TYPE_CHECKING:
    _OfSources = Placed
else:
    _OfSources = create_model("_OfSources", __base__=Placed, __module__=__name__, **_fields_of(DrafterConfig))


class DrafterSettings(_OfSources):
    """The drafter and its sources: the settings marked in ``DrafterConfig``, and the placement of the drafter."""

    keep_calibration: bool = Field(
        True, description="store in cache_dir how good the sources' drafts were; that holds no text"
    )
    session_silence_s: float = Field(
        SILENCE_S, ge=1, description="seconds without a word of a request after which the drafter drops its text"
    )
    trusted: bool = Field(
        True,
        description="whether answers may depend on what a drafter says, as they do under `acceptance: rejection`; "
        "false where its code, weights or machine are not yours",
    )
    models: tuple[Path, ...] | None = Field(
        None,
        description="folders of weights that draft, one for each kind: a small language model, or a head for the target's "
        "hidden states (EAGLE, EAGLE-3, FSPAD); None: those that come with Outrider for the model; []: none",
    )
    models_in: Literal["drafter", "verifier"] = Field(
        "drafter",
        description="whose processes run them: the drafter's, on a device of their own, or the verifier's, beside the "
        "target, where hidden states are not copied",
    )
    streaming_form: Literal["two_steps", "one_pass", "cheaper"] = Field(
        "two_steps",
        description="where speculative streams are computed: by the drafter, from the row that ended a step; in the "
        "target's own pass, for the rows that are likely to end it; or there where it costs less, and else by the drafter",
    )
    streaming_prune_below: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="in the target's own pass, rows behind an edge of the tree that the streams' early exit gives less "
        "probability have no streams; 0: it is not asked",
    )
    host: str = Field("127.0.0.1", description="interface on which the drafter serves the verifier")


class RetrievalSettings(Placed):
    """The retrieval index: a folder, or versions in Redis. Without one, strategies that need it are refused."""

    index: Path | None = Field(None, description="folder of an index that `outrider index build` made")
    redis_url: str | None = Field(
        None, description="redis:// or rediss:// URL where versions are published; the live one is followed"
    )
    redis_password: str | None = Field(
        None, repr=False, description="of that Redis, where the URL holds none; in the environment or a file alone"
    )
    name: str = Field("default", pattern="^[A-Za-z0-9._-]{1,64}$", description="of the index in Redis")
    semantic: bool = Field(
        False, description="also search by the target's hidden states; needs an index built with --semantic"
    )
    host: str = Field("127.0.0.1", description="interface on which retrieval serves the drafters")

    @property
    def enabled(self) -> bool:
        """Whether there is an index."""
        return self.index is not None or self.redis_url is not None

    def check_place(self) -> None:
        """Check that the settings name at most one place.

        Raises:
            ConfigurationError: they name two, or a password for none.
        """
        if self.index is not None and self.redis_url is not None:
            raise ConfigurationError("retrieval.index and retrieval.redis_url: set one of the two")
        if self.redis_password is not None and self.redis_url is None:
            raise ConfigurationError("retrieval.redis_password is set, but not retrieval.redis_url: set both or neither")


class Settings(BaseSettings):
    """All settings of a service."""

    model_config = SettingsConfigDict(
        extra="forbid", env_prefix=_PREFIX, env_nested_delimiter="__", frozen=True, protected_namespaces=()
    )

    model: str = Field("smollm2-135m-instruct", description="Hugging Face name, folder, GGUF file, or the built-in one")
    internal_token: str | None = Field(
        None, min_length=16, description="shared by the components; in the environment or a file alone; None: drawn at start"
    )
    internal_token_file: Path | None = Field(None, description="file that holds it instead, such as a mounted secret")
    cache_dir: Path = Field(default_factory=cache_folder, description="folder of models, indexes and measurements")
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
            raise ConfigurationError(f"--set {flag}: must be section.key=value, such as verifier.dtype=bfloat16")
        if key in _SECRETS:
            raise ConfigurationError(
                f"--set {key}: every user of this machine could read it in the list of processes; set {_SECRETS[key]}"
            )
        _put(merged, key.split("."), value)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot read the configuration {path}: it is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"the configuration {path} must be a mapping of sections")
    _check_keys(content, str(path))
    return content


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        both[key] = {**under, **value} if isinstance(under, dict) and isinstance(value, dict) else value
    return both


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_keys(content: Mapping[Any, Any], path: str) -> None:
    for section, below in content.items():
        for key in (section, *(below if isinstance(below, dict) else ())):
            # YAML reads the keys 1 and yes as a number and a boolean.
            if not isinstance(key, str):
                raise ConfigurationError(f"the configuration {path} has the key {key!r}: keys must be names of settings")


def _put(tree: dict[str, Any], keys: Sequence[str], value: str) -> None:
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigurationError(f"{'.'.join(keys)}: {key} is a value, not a section")
        tree = below
    try:
        tree[keys[-1]] = yaml.safe_load(value) if value[:1] in ("[", "{") or value == "null" else value
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{'.'.join(keys)} is {value!r}: not a YAML list or mapping") from error


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown setting {key}; known here: {', '.join(_siblings(problem['loc']))}")
        else:
            shown = "hidden" if key in _SECRETS else repr(problem["input"])
            lines.append(f"{key} is {shown}: {problem['msg']}")
    return "; ".join(lines)


def _siblings(loc: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Settings
    for part in loc[:-1]:
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return sorted(section.model_fields)
