"""Two routers, verifiers and drafters on a real local Ray, with mutual TLS: what goes where, and what is lost when they go.

And weights that are replaced are replaced at both verifiers. One service for all tests, since so many processes take a while to start.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme

import outrider
from outrider import Client
from tests.running.patience import PATIENCE_S
from tests.running.ports import free_port
from tests.servers.checked_load import OPTIONS, Load, plain_answers, prompt, wait_until
from tests.servers.component_certificates import tls_flags, write_certificates
from tests.servers.on_ray import Service
from tests.tiny_models.new_weights import other_weights

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, as "a", and of the same with other weights, as "b"."""
    made = tmp_path_factory.mktemp("weights").resolve()
    shutil.copytree(tiny_model, made / "a")
    other_weights(tiny_model, made / "b")
    return made


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    certificates, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    for role in ("verifier", "drafter"):
        write_certificates(certificates, authority, role)
    flags = [
        *tls_flags(certificates),
        f"server.port={free_port()}", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096", "verifier.threads=1",
        "verifier.budget=fixed", "drafter.keep_calibration=false", "verifier.num_cpus=0.25", "router.replicas=2",
        "verifier.replicas=2", "drafter.replicas=2", "verifier.drain_s=1", "server.drain_delay_s=0.5",
        # A service of somebody else may run on this machine.
        "server.ops_port=0", f"verifier.weights_from=['{folder}']",
    ]  # fmt: skip
    running = Service(folder / "a", flags, stderr=subprocess.PIPE)
    yield running
    running.stop()


def steps(service: Service) -> list[int]:
    """Passes of each verifier, in no particular order."""
    return sorted(stats["times"]["steps"] for stats in service.ask_all("verifier", "loop_stats"))


def test_one_beginning_goes_to_one_verifier_and_others_to_both(service: Service) -> None:
    with Client(service.address) as client:
        assert steps(service) == [0, 0]
        for _ in range(4):
            client.generate(token_ids=prompt(0), seed=1, **OPTIONS)
        idle, busy = steps(service)
        assert (idle, busy > 0) == (0, True)
        # Sixteen beginnings at random: one verifier of two gets none of them once in 32,768 times.
        for number in range(1, 17):
            client.generate(token_ids=prompt(number), seed=1, **(OPTIONS | {"max_tokens": 2}))
        assert min(steps(service)) > 0


def test_a_beginning_whose_verifier_is_busy_goes_to_the_other_one(service: Service) -> None:
    with Client(service.address) as client:
        before = steps(service)
        with client.stream(token_ids=prompt(0), seed=1, **(OPTIONS | {"max_tokens": 400})) as busy:
            next(busy)
            client.generate(token_ids=prompt(0), seed=1, **(OPTIONS | {"max_tokens": 2}))
        assert all(new > old for old, new in zip(before, steps(service), strict=True))


def test_each_verifier_has_a_drafter_of_its_own(service: Service) -> None:
    drafters = {address for _, address in service.ask_all("drafter", "place")}
    assert len(drafters) == 2
    wait_until(lambda: set(service.ask_all("verifier", "drafter_address")) == drafters)


def test_forgetting_reaches_all_and_says_who_did_not_answer(service: Service) -> None:
    victim = service.ask_all("drafter", "process_id")[0]
    # Each try takes as long as verifiers and routers wait for those that hang.
    with Client(service.address, retry=outrider.Retry(attempts=1)) as client:
        client.forget()
        os.kill(victim, signal.SIGSTOP)
        try:
            with pytest.raises(
                outrider.Unavailable, match=r"not all of 2 drafter replicas|1 of [23] (drafter|verifier) replicas"
            ):
                client.forget()
        finally:
            os.kill(victim, signal.SIGCONT)


@pytest.fixture(scope="module")
def expected(service: Service) -> dict[int, tuple[int, ...]]:
    return plain_answers(service.address)


def test_a_verifier_and_a_drafter_that_die_cost_no_stream(service: Service, expected: dict[int, tuple[int, ...]]) -> None:
    victims = [service.ask_all(part, "process_id")[0] for part in ("verifier", "drafter")]
    load = Load(service.address, expected)
    try:
        wait_until(lambda: load.answers > 4)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        seen = load.answers
        wait_until(lambda: load.answers > seen + 8)
        for part, victim in zip(("verifier", "drafter"), victims, strict=True):
            wait_until(lambda: len(now := service.ask_all(part, "process_id")) == 2 and victim not in now)  # noqa: B023
    finally:
        load.stop()
    assert not load.failures


def test_a_rolling_redeployment_costs_no_stream(service: Service, expected: dict[int, tuple[int, ...]]) -> None:
    before = {part: set(service.ask_all(part, "process_id")) for part in ("router", "verifier", "drafter")}
    load = Load(service.address, expected)
    try:
        wait_until(lambda: load.answers > 4)
        service.redeploy("router.num_speculative_tokens=6")
        for part, old in before.items():
            assert not old & set(service.ask_all(part, "process_id"))
        seen = load.answers
        wait_until(lambda: load.answers > seen + 4)
    finally:
        load.stop()
    assert not load.failures


NUMBERS = range(8)


def answer(client: Client, number: int) -> tuple[str, tuple[int, ...]]:
    """Whose weights have decoded it, and its tokens; drafted for as the service likes best."""
    options = {name: value for name, value in OPTIONS.items() if name != "strategy"} | {"max_tokens": 100}
    said = client.generate(token_ids=prompt(number), seed=number, **options)
    return said.arithmetic, said.token_ids


def test_two_verifiers_change_their_weights_together_and_a_third_takes_them(
    service: Service, tiny_model: Path, folder: Path
) -> None:
    with Client(service.address) as client:
        first, _ = answer(client, 0)
        known = {(first, number): answer(client, number)[1] for number in NUMBERS}
        with pytest.raises(outrider.InvalidArgument):
            client.reload(str(tiny_model))
        over, found = threading.Event(), list[tuple[int, tuple[str, tuple[int, ...]]]]()

        def ask(number: int) -> None:
            with Client(service.address) as own:
                while not over.is_set():
                    found.append((number, answer(own, number)))

        asking = [threading.Thread(target=ask, args=(number,)) for number in NUMBERS]
        for thread in asking:
            thread.start()
        try:
            second = client.reload(str(folder / "b")).arithmetic
            wait_until(lambda: {number for number, said in list(found) if said[0] == second} == set(NUMBERS))
        finally:
            over.set()
            for thread in asking:
                thread.join()
        known |= {(second, number): answer(client, number)[1] for number in NUMBERS}
        assert first != second
        for number, (named, tokens) in found:
            assert tokens == known[named, number]
        # The one that takes the place of a dead one serves what the other one serves.
        os.kill(service.ask("verifier", "process_id"), signal.SIGKILL)
        replaced = [str(folder / "b")]
        wait_until(lambda: [each[:1] for each in service.ask_all("verifier", "replaced_weights")] == [replaced, replaced])
        for number in NUMBERS:
            assert answer(client, number) == (second, known[second, number])
        assert client.reload(str(folder / "a"), running="restart").arithmetic == first
        for number in NUMBERS:
            assert answer(client, number) == (first, known[first, number])


def test_the_death_of_ray_ends_the_service(service: Service) -> None:
    raylet = next(child for child in psutil.Process(service.process.pid).children() if child.name() == "raylet")
    raylet.kill()
    assert service.process.wait(PATIENCE_S) == 1
    assert service.process.stderr is not None
    assert "error: Ray is gone: its node manager (raylet) has died" in " ".join(service.process.stderr.read().split())
