"""A throw-away certificate authority, and files of what it issues that are replaced as in production."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOCAL = ("localhost", "127.0.0.1")
"""What the certificate of a bridge that tests reach has to name."""
MAIL = "mailto:"
"""Starts a name that becomes an address of mail."""
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes
    serial: int


class Authority:
    """Issues certificates."""

    def __init__(self, name: str = "test authority") -> None:
        """Make a key and a root."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    @cached_property
    def certificate(self) -> bytes:
        """Return the root in PEM."""
        builder = _builder(self._name, self._name, self._key.public_key(), datetime.now(UTC) + 30 * _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = {name: name in {"key_cert_sign", "crl_sign"} for name in _USAGES}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: str, common_name: str = "", lasts: timedelta = _DAY) -> Issued:
        """Return a certificate for DNS names, addresses, URIs and mail; one that does not last has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        common = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        builder = _builder(x509.Name(common), self._name, key.public_key(), datetime.now(UTC) + lasts)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=True)
        signed = builder.sign(self._key, hashes.SHA256())
        return Issued(
            certificate=signed.public_bytes(serialization.Encoding.PEM),
            key=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            serial=signed.serial_number,
        )


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Secret:
    """A folder as Kubernetes mounts a secret: every file is a link through one link, which is swapped as a whole."""

    def __init__(self, directory: Path, issued: Issued, ca: bytes) -> None:
        """Mount it at `directory`."""
        self.directory = directory
        self._version = 0
        directory.mkdir(parents=True, exist_ok=True)
        self.put(issued, ca)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (directory / name).symlink_to(Path("..data", name))

    @property
    def certificate(self) -> str:
        """Return the certificate's path."""
        return str(self.directory / "tls.crt")

    @property
    def key(self) -> str:
        """Return the key's path."""
        return str(self.directory / "tls.key")

    @property
    def ca(self) -> str:
        """Return the path of the authorities."""
        return str(self.directory / "ca.crt")

    def put(self, issued: Issued, ca: bytes) -> None:
        """Replace everything at once."""
        self._version += 1
        folder = self.directory / f"..{self._version}"
        folder.mkdir()
        for name, content in (("tls.crt", issued.certificate), ("tls.key", issued.key), ("ca.crt", ca)):
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
        link = self.directory / "..data_tmp"
        link.symlink_to(folder.name)
        link.replace(self.directory / "..data")

    def server_flags(self, *, client_ca: bool = True) -> Sequence[str]:
        """Return the flags of a bridge that is secured by it."""
        flags = ("--tls-certificate", self.certificate, "--tls-key", self.key, "--tls-poll-seconds", "0.05")
        return (*flags, "--tls-client-ca", self.ca) if client_ca else flags


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    begin = min(end, datetime.now(UTC)) - _DAY
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    if name.startswith(MAIL):
        return x509.RFC822Name(name.removeprefix(MAIL))
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
