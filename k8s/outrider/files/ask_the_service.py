"""What `helm test` runs: asks the service as its users do, and compares one strategy's tokens with plain decoding's.

Reads its environment: READY_URL (a router's /ready), SERVICE ("host:port" of gRPC; unset: the API listens on the pods'
loopback alone, and only READY_URL is asked), STRATEGY, TLS ("yes" or "no") and API_KEY. Ends with code 1 and a line where
something is wrong.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import outrider

_PROMPTS = (
    "The capital of France is",
    "One, two, three, four, five, six, seven, one, two, three, four,",
)
_AUTHORITY = Path("/etc/outrider/authority/ca.crt")
_PATIENCE_S = 600.0


def wait_until_ready(url: str, patience_s: float = _PATIENCE_S) -> None:
    """Wait until a router would answer a request."""
    until = time.monotonic() + patience_s
    # The service is in this cluster: a proxy that the environment names is the way out of it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with direct.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > until:
                sys.exit(f"{url} is not ready after {patience_s:g} s: {error}")
            time.sleep(2)


def compare(address: str, strategy: str, api_key: str | None, tls: bool) -> None:
    """Compare answers to a few prompts, greedy and sampled."""
    roots = _AUTHORITY.read_bytes() if _AUTHORITY.is_file() else None
    with outrider.Client(address, api_key=api_key, tls=tls, root_certificates=roots) as client:
        (model,) = client.models()
        if strategy not in model.strategies:
            sys.exit(f"tests.strategy is {strategy}: {model.name} is served with {', '.join(model.strategies)}")
        for prompt in _PROMPTS:
            for temperature in (0.0, 0.8):
                plain, drafted = (
                    client.generate(prompt, strategy=name, temperature=temperature, seed=7, max_tokens=32)
                    for name in ("autoregressive", strategy)
                )
                if plain.token_ids != drafted.token_ids:
                    sys.exit(f"{strategy} says {drafted.text!r} and plain decoding {plain.text!r} after {prompt!r}")
                print(f"{model.name}, temperature {temperature:g}: {strategy} equals plain decoding: {plain.text!r}")


def main() -> None:
    """Make all checks."""
    given = os.environ
    wait_until_ready(given["READY_URL"])
    print("a router is ready")
    if "SERVICE" not in given:
        print("tokens are not compared: without apiKeys.secretName the API listens on the pods' loopback alone")
        return
    if "API_KEY" not in given:
        sys.exit("tests.apiKeySecretName is empty: name a secret that holds an API key")
    compare(given["SERVICE"], given["STRATEGY"], given["API_KEY"], given["TLS"] == "yes")


if __name__ == "__main__":
    main()
