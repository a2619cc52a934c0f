"""What the pods of a chart offer to the components (k8s/outrider writes it beside the settings, as ``pods.yaml``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cluster.settings.placement import Section
from services.patterns import DRIVER, QUANTITY
from services.wrong_values import allowed
from services.yaml_text import read_documents, read_yaml
from speculation.errors import ConfigurationError, quoted

_FACTORS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    **{unit: 1000.0**power for power, unit in enumerate("KMGTP", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)},
}
SETTINGS_KEY, PODS_KEY = "outrider.yaml", "pods.yaml"


def amount(quantity: str) -> float:
    """A quantity as Kubernetes writes it: 500m, 2, 4Gi, in cores or bytes."""
    number = quantity.rstrip("".join(sorted(set("".join(_FACTORS)))))
    return float(number) * _FACTORS[quantity[len(number) :]]


_Quantity = Annotated[str, Field(pattern=QUANTITY)]


class GroupOffer(Section):
    """The pods of one group."""

    pods: tuple[int, int] = Field(description="fewest and most of them")
    cpu: _Quantity
    memory: _Quantity
    shared_memory: _Quantity
    gpus: int = Field(0, ge=0, description="of each pod")
    gpu_memory: _Quantity | None = Field(None, description="of each GPU")
    gpu_driver: str | None = Field(None, pattern=DRIVER, description="NVIDIA's, on the nodes")


class StorageOffer(Section):
    """The volume that all pods share."""

    path: Path
    size: _Quantity | None = Field(None, description="None: not known")


class GroupOffers(Section):
    """The groups: routers; drafters and retrieval services; verifiers."""

    router: GroupOffer
    drafting: GroupOffer
    verifier: GroupOffer


class Offer(Section):
    """What a chart's pods offer."""

    storage: StorageOffer
    groups: GroupOffers
    index_url_in_secret: bool = Field(False, description="whether retrieval.redis_url comes from a secret")
    component_certificates: tuple[Literal["verifier", "drafter", "retrieval"], ...] = Field(
        (), description="components that have certificates for mutual TLS"
    )


def read_offer(content: Any, where: str) -> Offer:
    """Check what was read.

    Raises:
        ConfigurationError: it is not what a chart writes; names ``where`` and the field.
    """
    try:
        return Offer.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        wanted = allowed(first)
        raise ConfigurationError(
            "" if wanted else first["msg"],
            place=where,
            field=field or "content",
            value="unset" if first["type"] == "missing" else quoted(first["input"]),
            allowed=wanted,
        ) from error


def in_manifests(text: str, where: str) -> tuple[dict[str, Any], Offer]:
    """The settings and the offer in the output of ``helm template``.

    Raises:
        ConfigurationError: it is not YAML, or holds not exactly one service.
    """
    try:
        manifests = [each for each in read_documents(text) if isinstance(each, dict)]
    except ValueError as error:
        raise ConfigurationError(f"not YAML ({error})", field=where) from error
    found = [
        data for each in manifests if isinstance(data := each.get("data"), dict) and {SETTINGS_KEY, PODS_KEY} <= set(data)
    ]
    if len(found) != 1:
        raise ConfigurationError(
            (
                f"holds {len(found)} ConfigMaps with {SETTINGS_KEY} and {PODS_KEY}; must hold one, as `helm "
                "template NAME k8s/outrider` writes it"
            ),
            field=where,
        )
    try:
        settings, pods = (read_yaml(str(found[0][key])) for key in (SETTINGS_KEY, PODS_KEY))
    except ValueError as error:
        raise ConfigurationError(f"{SETTINGS_KEY} or {PODS_KEY} is not YAML ({error})", field=where) from error
    if not isinstance(settings, dict | None):
        raise ConfigurationError(f"{SETTINGS_KEY} must hold a mapping of sections", field=where)
    return settings or {}, read_offer(pods, where)
