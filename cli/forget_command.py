"""``outrider forget``."""

from __future__ import annotations

from cli.options import Address, ApiKey, ConfigFile, Set, Tls, TlsRoot, credentials, default_address, settings_of
from cluster.process.terminal import stderr


def forget(
    address: Address = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_root: TlsRoot = None,
) -> None:
    """Delete what a server remembers of this API key's requests: answers, computed prompts, what drafters have learned."""
    import outrider

    where = address or default_address(settings_of(config, settings))
    with outrider.Client(where, timeout_s=30, **credentials(api_key, tls, tls_root)) as client:
        client.forget()
    stderr().print(f"{where} forgets what it remembered of these requests")
