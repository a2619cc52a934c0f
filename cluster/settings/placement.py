"""Settings of placement: where components run, how many replicas, and how they recognise each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from services.patterns import NAME, RESOURCE


class Section(BaseModel):
    """Settings that belong together; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscaling(Section):
    """Between which numbers of replicas Ray Serve chooses by the load that they report (cluster/ray/scaling.py)."""

    min_replicas: int = Field(1, ge=1, description="fewest replicas, of which so many are started")
    max_replicas: int = Field(ge=1, description="most replicas that there may ever be")
    upscale_delay_s: float = Field(10, ge=0, description="seconds of high load before replicas are added")
    downscale_delay_s: float = Field(900, ge=0, description="seconds of low load before replicas are taken away")
    look_back_period_s: float = Field(10, ge=1, description="seconds over which the load is averaged")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}: must be at most max_replicas, {self.max_replicas}")
        return self


class Placed(Section):
    """A component that Ray places on nodes."""

    replicas: int = Field(
        1, ge=1, description="replicas of the component, each a process (of a verifier: one for each of its stages)"
    )
    autoscaling: Autoscaling | None = Field(
        None,
        description="bounds between which the number of replicas follows the load, instead of replicas; null: it is fixed",
    )
    max_replicas_per_node: int | None = Field(
        None, ge=1, le=100, description="most replicas on one node; null: as many as have room"
    )
    num_cpus: float = Field(0.25, ge=0, description="cores that Ray sets aside for each process of the component")
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray sets aside for each process of the component")

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling: set one of the two (autoscaling.min_replicas are started)")
        if self.max_replicas_per_node is not None and self.processes > 1:
            raise ValueError("max_replicas_per_node: Ray takes it only where a replica is one process (stages: 1)")
        return self

    @property
    def processes(self) -> int:
        """Processes of each replica; each gets the component's cores and GPUs."""
        return 1

    @property
    def processes_together(self) -> int:
        """Of these, how many must be on one node with one another."""
        return 1

    @property
    def fewest(self) -> int:
        """Replicas that are started."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def most(self) -> int:
        """Replicas that there may ever be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


class MutualTlsSettings(Section):
    """PEM files with which components prove to each other what they are. ``{role}`` in a path is verifier, drafter or
    retrieval, and router where router.verifiers are set. A certificate must name ROLE.outrider.internal (subject alternative
    name, DNS) for each role it may play. Changed files are read at the next connection."""

    certificate: Path = Field(description="certificate chain of the component in {role}, such as /etc/outrider/{role}.pem")
    key: Path = Field(description="private key of that certificate, without password")
    ca: Path = Field(description="certificates of the authority that all components trust")


def _not_of_ray(name: str) -> str:
    if name.upper() in ("CPU", "GPU", "TPU", "MEMORY", "OBJECT_STORE_MEMORY"):
        raise ValueError("Ray gives this name itself; name a custom resource, such as outrider_router")
    return name


CustomResource = Annotated[str, Field(pattern=RESOURCE), AfterValidator(_not_of_ray)]


class PlacementSettings(Section):
    """Custom resources of Ray's nodes: a component runs only on nodes that have its own.

    A Ray that ``outrider serve`` starts itself has them all.
    """

    router: CustomResource | None = Field(
        None, description="custom resource of the nodes on which routers run, such as outrider_router; null: any"
    )
    drafter: CustomResource | None = Field(None, description="custom resource of the nodes on which drafters run; null: any")
    retrieval: CustomResource | None = Field(
        None, description="custom resource of the nodes on which retrieval runs; null: any"
    )
    verifier: CustomResource | None = Field(
        None, description="custom resource of the nodes on which verifiers and all their stages run; null: any"
    )
    stages: Literal["PACK", "STRICT_PACK"] = Field(
        "PACK",
        description="PACK: the stages of one verifier run on as few nodes as have room; STRICT_PACK: on one node alone, "
        "as the ranks of one stage always do",
    )
    patience_s: float | None = Field(
        300,
        ge=0,
        description="seconds that `serve deploy` and a RayService wait for such nodes to join; null: for ever, where a "
        "group may have none until replicas wait for it",
    )


class ClusterSettings(Section):
    """What distinguishes this service from others on the same Ray, and how its components trust each other."""

    name: str = Field(
        "outrider",
        pattern=NAME,
        description="name of the application on Ray; two on one Ray need two names",
    )
    placement: PlacementSettings = PlacementSettings()
    tls: MutualTlsSettings | None = Field(
        None, description="files of mutual TLS between components; null: internal_token alone protects their links"
    )
