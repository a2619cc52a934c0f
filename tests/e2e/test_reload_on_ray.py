"""Weights replaced on a real local Ray: at two verifiers together, under load, and at one that starts afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

import outrider
from outrider import Client
from tests.checked_load import wait_until
from tests.new_weights import other_weights
from tests.on_ray import Service

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

NUMBERS = range(8)


def answer(client: Client, number: int) -> tuple[str, tuple[int, ...]]:
    prompt = [40 + number, 41, 42] * 12
    said = client.generate(token_ids=prompt, max_tokens=100, ignore_eos=True, temperature=1.0, seed=number)
    return said.arithmetic, said.token_ids


def test_two_verifiers_change_together_and_a_third_takes_their_weights(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "a")
    other_weights(tiny_model, tmp_path / "b")
    flags = [
        "server.port=0", "server.ops_port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096",
        "verifier.threads=1", "verifier.budget=fixed", "drafter.keep_calibration=false", "verifier.num_cpus=0.25",
        "verifier.replicas=2", "verifier.drain_s=1", f"verifier.weights_from=['{tmp_path}']",
    ]  # fmt: skip
    service = Service(tmp_path / "a", flags)
    try:
        with Client(service.address) as client:
            plain = dict([answer(client, 0)])
            (first,) = plain
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
            second = client.reload(str(tmp_path / "b")).arithmetic
            wait_until(lambda: {number for number, said in list(found) if said[0] == second} == set(NUMBERS))
            over.set()
            for thread in asking:
                thread.join()
            known |= {(second, number): answer(client, number)[1] for number in NUMBERS}
            assert first != second
            for number, (named, tokens) in found:
                assert tokens == known[named, number]
            # The one that takes the place of a dead one serves what the other one serves.
            victim = service.ask("verifier", "process_id")
            os.kill(victim, signal.SIGKILL)
            folder = [str((tmp_path / "b").resolve())]
            wait_until(lambda: [each[:1] for each in service.ask_all("verifier", "replaced_weights")] == [folder, folder])
            for number in NUMBERS:
                assert answer(client, number) == (second, known[second, number])
            assert client.reload(str(tmp_path / "a"), running="restart").arithmetic == first
            for number in NUMBERS:
                assert answer(client, number) == (first, known[first, number])
    finally:
        service.stop()
