"""Starts the further pipeline stages of a target, as child processes or as Ray actors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from services.verifier.stages.upstream import Launch, StageHandle, StageSpec


class _Child:
    """A child process. It ends by itself if this process is killed."""

    def __init__(self, spec: StageSpec) -> None:
        from services.verifier.stages.process import spec_to_json

        # In its own session the child gets no Ctrl-C from the terminal; the parent ends its stages in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.verifier.stages.process", spec_to_json(spec)], start_new_session=True
        )

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, patience_s: float) -> None:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def launch_child(spec: StageSpec) -> StageHandle:
    """Start a stage as a child process."""
    return _Child(spec)


class _Actor:
    def __init__(self, actor: Any, spec: StageSpec) -> None:
        from services.verifier.stages.process import spec_to_json

        self._actor = actor
        self._run = actor.run.remote(spec_to_json(spec))

    def alive(self) -> bool:
        import ray

        ended, _ = ray.wait([self._run], timeout=0)
        return not ended

    def stop(self, patience_s: float) -> None:
        import ray

        ray.wait([self._run], timeout=patience_s)
        ray.kill(self._actor)


def launcher_in(placement_group: Any, *, num_cpus: float, num_gpus: float) -> Launch:
    """A ``Launch`` that starts stages as actors in a verifier replica's placement group.

    Each bundle has room for the ranks of one stage. Bundle 0 is the last one's, of which the replica is a rank itself;
    stage n of the others gets bundle n + 1.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Stage:
        """An actor that runs one stage until it is stopped."""

        def run(self, spec: str) -> None:
            from cluster.process.starting import begin_starting

            begin_starting()
            from services.verifier.stages.process import serve, spec_from_json

            serve(spec_from_json(spec))

    def launch(spec: StageSpec) -> StageHandle:
        bundle = (spec.stage + 1) % spec.config.stages
        strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
        actor = ray.remote(Stage).options(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy).remote()
        return _Actor(actor, spec)

    return launch
