"""Settings of the components: those marked in their configuration classes, and those of their place and their start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from cluster.settings.marked import marked
from cluster.settings.placement import Placed
from services.drafter.config import DrafterConfig
from services.links.open_sessions import SILENCE_S
from services.patterns import ADDRESS
from services.retrieval.config import RetrievalConfig
from services.router.config import RouterConfig
from services.router.strategies import StrategyConfig
from services.verifier.config import CACHE_TOKENS, TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from speculation.errors import ConfigurationError

if TYPE_CHECKING:

    class _OfRouter(Placed, StrategyConfig): ...

    class _OfVerifier(Placed, VerifierConfig, TargetConfig, LoopConfig): ...

    class _OfRetrieval(Placed, RetrievalConfig): ...

    _OfDrafter = Placed
else:
    _OfRouter = marked(RouterConfig, Placed)
    _OfVerifier = marked(VerifierConfig, Placed)
    _OfDrafter = marked(DrafterConfig, Placed)
    _OfRetrieval = marked(RetrievalConfig, Placed)


class RouterSettings(_OfRouter):
    """The public entry, and defaults for requests that leave values unset."""

    verifiers: tuple[Annotated[str, Field(pattern=ADDRESS)], ...] = Field(
        (),
        description="HOST:PORT of each verifier that `outrider verify` runs elsewhere, outside of Ray, with a drafter of "
        "its own or at its drafter.address; the service then starts routers alone; none: it starts its verifiers itself",
    )


class VerifierSettings(_OfVerifier):
    """The target model and the decoding loop."""

    num_cpus: float = Field(1, ge=0, description="cores that Ray sets aside for each process of a verifier")
    drain_s: float = Field(
        30,
        ge=0,
        le=86_400,
        description="seconds that answers have to finish when a verifier stops; the rest moves to others",
    )
    host: str = Field("127.0.0.1", description="interface on which a verifier that `outrider verify` runs serves routers")
    port: int = Field(0, ge=0, le=65535, description="port of such a verifier; 0: any free one")

    @property
    @override
    def processes(self) -> int:
        return self.stages * self.tensor_parallel_size

    @property
    @override
    def processes_together(self) -> int:
        return self.tensor_parallel_size

    @property
    @override
    def sized_by_gpu(self) -> bool:
        """See ``TargetConfig``."""
        return self.kv_cache_tokens is None and self.device != "cpu"

    @property
    def known_cache_tokens(self) -> int | None:
        """Tokens that the KV cache holds; None: the memory of a GPU says it."""
        return None if self.sized_by_gpu else self.kv_cache_tokens or CACHE_TOKENS


class DrafterSettings(_OfDrafter):
    """The drafter and its sources of drafts."""

    keep_calibration: bool = Field(
        True, description="whether to store in cache_dir how good the sources' drafts were, which holds no text"
    )
    session_silence_s: float = Field(
        SILENCE_S, ge=1, description="seconds without a word of a request after which the drafter drops its text"
    )
    trusted: bool = Field(
        True,
        description="whether answers may depend on what a drafter says, as they do under `acceptance: rejection`; "
        "false where its code, weights or machine are not yours",
    )
    models: tuple[Path | dict[str, Any], ...] | None = Field(
        None,
        description="folders of weights that draft: small language models, heads for the target's hidden states (EAGLE, "
        "EAGLE-3, FSPAD), streams, Medusa's heads, Uno's adapter; of a second one of a kind, a mapping of folder, name "
        "and, if wanted, tenants and when; null: those that come with Outrider for the model; []: none",
    )
    models_in: Literal["drafter", "verifier"] = Field(
        "drafter",
        description="whose processes run the models that draft: the drafter's, on a device of their own, or the "
        "verifier's, beside the target, where hidden states are not copied",
    )
    streaming_form: Literal["two_steps", "one_pass", "cheaper"] = Field(
        "two_steps",
        description="where speculative streams are computed: two_steps: by the drafter, from the row that ended a step; "
        "one_pass: in the target's own pass, for the rows that are likely to end it; cheaper: there where it costs less, "
        "else by the drafter",
    )
    streaming_prune_below: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="with streams in the target's own pass, rows behind an edge of the tree that their early exit gives "
        "less probability have no streams; 0: it is not asked",
    )
    host: str = Field("127.0.0.1", description="interface on which the drafter serves the verifier")
    port: int = Field(0, ge=0, le=65535, description="port of a drafter that `outrider draft` runs; 0: any free one")
    address: str | None = Field(
        None,
        pattern=ADDRESS,
        description="HOST:PORT of a drafter that `outrider draft` runs elsewhere, outside of Ray, with an index of its own; "
        "the service then starts none; null: it starts its drafters itself",
    )


class RetrievalSettings(_OfRetrieval):
    """The retrieval index: a folder, or versions in Redis. Without one, strategies that need it are refused."""

    semantic: bool = Field(
        False, description="whether to search by the target's hidden states as well; needs an index built with --semantic"
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
            raise ConfigurationError("set one of the two", field="retrieval.index and retrieval.redis_url")
        if self.redis_password is not None and self.redis_url is None:
            raise ConfigurationError(
                "set both or neither", field="retrieval.redis_password", value="set", given="but not retrieval.redis_url"
            )
