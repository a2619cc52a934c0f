"""The files of mutual TLS between components, and checks of them that need no gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from services.links.tls.trial import refusal
from speculation.errors import ConfigurationError

_DOMAIN = "outrider.internal"
# Who may call whom: server's role -> callers' roles. On Ray the router's calls to verifiers are Ray's, with TLS of its own.
CALLERS = {"drafter": ("verifier",), "retrieval": ("drafter",), "verifier": ("router",)}
# Roles that always have a server; a verifier has one outside of Ray alone.
_SERVERS = ("drafter", "retrieval")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentTls:
    """PEM files of one component, and its role.

    Attributes:
        role: router, verifier, drafter or retrieval; its certificate names ``ROLE.outrider.internal``.
        certificate: certificate chain.
        key: its private key, without password.
        ca: certificates of the authority that signs all components' certificates.
        serves: it has a server, although not all of its role have one.
    """

    role: str
    certificate: Path
    key: Path
    ca: Path
    serves: bool = False


def name_of(role: str) -> str:
    """The DNS name that the certificate of a component in ``role`` must hold as a subject alternative name."""
    return f"{role}.{_DOMAIN}"


def check_files(files: ComponentTls) -> None:
    """Check the files: readable, a matching pair, signed by the authority, valid now, in the name of the role.

    Raises:
        ConfigurationError: they do not; names the setting.
    """
    for setting, file in (("certificate", files.certificate), ("key", files.key), ("ca", files.ca)):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"cannot be read ({error.strerror})", field=f"cluster.tls.{setting}", value=file
            ) from error
    if (wrong := mismatch(files)) is not None:
        raise ConfigurationError(
            field="cluster.tls.certificate",
            value=files.certificate,
            given=f"key is {files.key}, ca is {files.ca}",
            allowed=(
                "a certificate chain, its key without password, and certificates of the authority that signed "
                f"it, all in PEM ({wrong})"
            ),
        )
    if name_of(files.role) not in _names_in(files.certificate):
        raise ConfigurationError(
            f"must name {name_of(files.role)} as a subject alternative name (DNS), as the certificate of a {files.role}",
            field="cluster.tls.certificate",
            value=files.certificate,
        )


def mismatch(files: ComponentTls) -> str | None:
    """Why other components would refuse who shows these files; None if they would not."""
    called = files.serves or files.role in _SERVERS
    calls = any(files.role in callers for callers in CALLERS.values())
    try:
        for serving, plays in ((True, called), (False, calls)):
            if plays and (why := refusal(files.certificate, files.key, files.ca, serving=serving)) is not None:
                return why
    except (OSError, ValueError) as error:
        return getattr(error, "reason", None) or str(error)
    return None


def _names_in(certificate: Path) -> list[str]:
    try:
        extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
        return extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        return []


def expires_at(file: Path) -> float:
    """The end of the validity of the first certificate in a PEM file, in seconds since 1970.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate.
    """
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
