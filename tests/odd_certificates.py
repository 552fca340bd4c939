"""Certificates as nobody should issue them, by an authority that is trusted all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID, ObjectIdentifier

from tests.certificates import Authority, Issued

Key: TypeAlias = (
    ec.EllipticCurvePrivateKey
    | rsa.RSAPrivateKey
    | dsa.DSAPrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
)

GOOD_KEYS: dict[str, Callable[[], Key]] = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "ECDSA with P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ECDSA with P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
}
"""Kinds of keys that a node takes."""
BAD_KEYS: dict[str, Callable[[], Key]] = {
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
    "DSA": lambda: dsa.generate_private_key(2048),
    "ECDSA with P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "ECDSA with P-224": lambda: ec.generate_private_key(ec.SECP224R1()),
    "ECDSA with secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "ECDSA with another curve": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
}
"""Kinds that it does not."""
DNS, URI = 0x82, 0x86
"""Tags of alternative names."""
_NAMES = ObjectIdentifier("2.5.29.17")


def issue(
    authority: Authority,
    *names: str,
    key: Key | None = None,
    begins: timedelta = timedelta(days=-1),
    lasts: timedelta = timedelta(days=1),
) -> Issued:
    """Return a certificate for DNS names, of any key, and valid at any time."""
    built = _names(*names) if names else []
    return _issue(authority, key or GOOD_KEYS["ECDSA with P-256"](), built, begins, lasts)


def issue_raw(authority: Authority, names: Sequence[tuple[int, bytes]]) -> Issued:
    """Return one whose alternative names are these bytes, whatever they are."""
    encoded = b"".join(_element(tag, name) for tag, name in names)
    extension = x509.UnrecognizedExtension(_NAMES, _element(0x30, encoded))
    return _issue(authority, GOOD_KEYS["ECDSA with P-256"](), [extension], timedelta(days=-1), timedelta(days=1))


def chain(authority: Authority, name: str, depth: int) -> list[Issued]:
    """Return a certificate and the so many between it and the root, each issued by the next one."""
    made: list[Issued] = []
    issuer_key, issuer = authority._key, authority._name
    for number in range(depth):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"between {number}")])
        built = x509.BasicConstraints(ca=True, path_length=None)
        made.insert(0, _sign(subject, issuer, issuer_key, key, [built], timedelta(days=-1), timedelta(days=1)))
        issuer_key, issuer = key, subject
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = _sign(x509.Name([]), issuer, issuer_key, key, _names(name), timedelta(days=-1), timedelta(days=1))
    return [leaf, *made]


def _issue(
    authority: Authority, key: Key, built: Sequence[x509.ExtensionType], begins: timedelta, lasts: timedelta
) -> Issued:
    return _sign(x509.Name([]), authority._name, authority._key, key, built, begins, lasts)


def _sign(  # noqa: PLR0917 - a certificate has so many parts
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    key: Key,
    built: Sequence[x509.ExtensionType],
    begins: timedelta,
    lasts: timedelta,
) -> Issued:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now + begins).not_valid_after(now + lasts)
    for extension in built:
        builder = builder.add_extension(extension, critical=True)
    signed = builder.sign(issuer_key, hashes.SHA256())
    return Issued(
        certificate=signed.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        serial=signed.serial_number,
    )


def _names(*names: str) -> list[x509.ExtensionType]:
    return [x509.SubjectAlternativeName([x509.DNSName(name) for name in names])]


def _element(tag: int, content: bytes) -> bytes:
    assert len(content) < 1 << 16
    length = bytes([len(content)]) if len(content) < 0x80 else b"\x82" + len(content).to_bytes(2, "big")
    return bytes([tag]) + length + content
