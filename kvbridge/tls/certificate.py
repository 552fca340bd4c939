"""How long a certificate is valid, for what kind of key, and what extensions it has, from its DER encoding.

No library that a node has tells it without a handshake, or without leaving something out.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL, serialNumber INTEGER,
        signature SEQUENCE, issuer SEQUENCE, validity SEQUENCE { notBefore Time, notAfter Time }, subject SEQUENCE,
        subjectPublicKeyInfo SEQUENCE { algorithm SEQUENCE { algorithm OID, parameters ANY }, ... },
        [1] OPTIONAL, [2] OPTIONAL, [3] { extensions SEQUENCE OF Extension } OPTIONAL }, ... }
    Extension ::= SEQUENCE { extnID OID, critical BOOLEAN OPTIONAL, extnValue OCTET STRING }

Nothing else is looked at: that the certificate is good is for the library that uses it to say.
"""

from __future__ import annotations

import binascii
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

from kvbridge.core.errors import BridgeError

_UNREADABLE = "holds a certificate that cannot be read"
_END = b"-----END CERTIFICATE-----"
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEFORE_VALIDITY = 3  # the serial number, the algorithm of the signature, and the issuer
_TWO_DIGIT_YEARS_FROM = 50  # of the 20th century, says RFC 5280
_OBJECT_IDENTIFIER, _BOOLEAN, _OCTETS, _EXTENSIONS = 0x06, 0x01, 0x04, 0xA3
_LONG_LENGTH = 0x80
_LENGTH_BYTES_MAX = 4


_EC = "2a8648ce3d0201"
_KINDS = {
    "2a864886f70d010101": "RSA",
    "2a864886f70d01010a": "RSA-PSS",
    "2a8648ce380401": "DSA",
    "2b6570": "Ed25519",
    "2b6571": "Ed448",
}
_CURVES = {
    "2a8648ce3d030107": "P-256",
    "2b81040022": "P-384",
    "2b81040023": "P-521",
    "2b81040021": "P-224",
    "2b8104000a": "secp256k1",
}
_OTHER = "another kind"
KEY_KINDS = frozenset({"RSA", "ECDSA with P-256", "ECDSA with P-384"})
"""Keys that gRPC makes handshakes with; OpenSSL takes more, and a node has one certificate for both."""


class CertificateError(BridgeError):
    """What ought to be a certificate is none."""


def validity_of(pem: bytes) -> tuple[float, float]:
    """Return from when until when the first certificate in `pem` is valid, in seconds of Unix time.

    Raises:
        CertificateError: there is none.
    """
    encoded = _first(pem)
    try:
        not_before, not_after = _validity(encoded)
        return not_before.timestamp(), not_after.timestamp()
    except (ValueError, IndexError) as error:
        raise CertificateError(_UNREADABLE) from error


def key_kind_of(pem: bytes) -> str:
    """Return of what kind the key of the first certificate in `pem` is, such as one of `KEY_KINDS`.

    Raises:
        CertificateError: there is none.
    """
    try:
        return _key_kind(_first(pem))
    except (ValueError, IndexError) as error:
        raise CertificateError(_UNREADABLE) from error


def extension_of(encoded: bytes, identifier: str) -> bytes:
    """Return the value of an extension, whose identifier is given in hexadecimal digits, of a certificate in DER.

    Raises:
        CertificateError: it is not there exactly once.
    """
    try:
        found = [value for kind, value in _extensions(encoded) if kind == identifier]
    except (ValueError, IndexError) as error:
        raise CertificateError(_UNREADABLE) from error
    if len(found) != 1:
        raise CertificateError("holds a certificate that has not the one extension")
    return found[0]


def sequence(encoded: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and the content of each element of a sequence.

    Raises:
        CertificateError: it is none.
    """
    try:
        return list(_elements(_element(encoded, _SEQUENCE)[0]))
    except (ValueError, IndexError) as error:
        raise CertificateError(_UNREADABLE) from error


def _extensions(encoded: bytes) -> Iterator[tuple[str, bytes]]:
    behind_key = _skip(_from_validity(encoded), 3)  # the validity, the subject and the key
    for tag, content in _elements(behind_key):
        if tag != _EXTENSIONS:
            continue
        for _, extension in _elements(_element(content, _SEQUENCE)[0]):
            kind, rest = _element(extension, _OBJECT_IDENTIFIER)
            value = _skip(rest, 1) if rest[0] == _BOOLEAN else rest
            yield kind.hex(), _element(value, _OCTETS)[0]


def _elements(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    while encoded:
        tag = encoded[0]
        content, encoded = _element(encoded, tag)
        yield tag, content


def _first(pem: bytes) -> bytes:
    begin, end = pem.find(_BEGIN), pem.find(_END)
    if not 0 <= begin < end:
        raise CertificateError("holds no PEM certificate")
    try:
        return ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)].decode("ascii"))
    except (ValueError, binascii.Error) as error:
        raise CertificateError(_UNREADABLE) from error


def _validity(encoded: bytes) -> tuple[datetime, datetime]:
    validity = _element(_from_validity(encoded), _SEQUENCE)[0]
    begin, rest = _element(validity, validity[0])
    return _time(validity[0], begin), _time(rest[0], _element(rest, rest[0])[0])


def _key_kind(encoded: bytes) -> str:
    from_key = _skip(_from_validity(encoded), 2)  # the validity and the subject
    algorithm = _element(_element(from_key, _SEQUENCE)[0], _SEQUENCE)[0]
    kind, parameters = _element(algorithm, _OBJECT_IDENTIFIER)
    if kind.hex() != _EC:
        return _KINDS.get(kind.hex(), _OTHER)
    curve = _element(parameters, parameters[0])[0]
    return f"ECDSA with {_CURVES.get(curve.hex(), 'another curve')}"


def _from_validity(encoded: bytes) -> bytes:
    to_be_signed = _element(_element(encoded, _SEQUENCE)[0], _SEQUENCE)[0]
    return _skip(to_be_signed, _BEFORE_VALIDITY + (to_be_signed[0] == _VERSION))


def _skip(encoded: bytes, count: int) -> bytes:
    for _ in range(count):
        encoded = _element(encoded, encoded[0])[1]
    return encoded


def _time(kind: int, encoded: bytes) -> datetime:
    text = encoded.decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _TWO_DIGIT_YEARS_FROM else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError(kind)
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _element(encoded: bytes, tag: int) -> tuple[bytes, bytes]:
    """Return the content of the first element, which must have this tag, and what follows it."""
    if encoded[0] != tag:
        raise ValueError(tag)
    start, length = 2, encoded[1]
    if length >= _LONG_LENGTH:
        count = length - _LONG_LENGTH
        if not 0 < count <= _LENGTH_BYTES_MAX:
            raise ValueError(count)
        start, length = 2 + count, int.from_bytes(encoded[2 : 2 + count], "big")
    if start + length > len(encoded):
        raise ValueError(length)
    return encoded[start : start + length], encoded[start + length :]
