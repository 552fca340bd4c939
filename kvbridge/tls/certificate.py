"""How long a certificate is valid, from its DER encoding; no library that a node has tells it without a handshake.

    Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL, serialNumber INTEGER,
        signature SEQUENCE, issuer SEQUENCE, validity SEQUENCE { notBefore Time, notAfter Time }, ... }, ... }

Nothing else is looked at: that the certificate is good is for the library that uses it to say.
"""

from __future__ import annotations

import binascii
import ssl
from datetime import UTC, datetime

from kvbridge.core.errors import BridgeError

_END = b"-----END CERTIFICATE-----"
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEFORE_VALIDITY = 3  # the serial number, the algorithm of the signature, and the issuer
_TWO_DIGIT_YEARS_FROM = 50  # of the 20th century, says RFC 5280
_LONG_LENGTH = 0x80
_LENGTH_BYTES_MAX = 4


class CertificateError(BridgeError):
    """What ought to be a certificate is none."""


def validity_of(pem: bytes) -> tuple[float, float]:
    """Return from when until when the first certificate in `pem` is valid, in seconds of Unix time.

    Raises:
        CertificateError: there is none.
    """
    begin, end = pem.find(_BEGIN), pem.find(_END)
    if not 0 <= begin < end:
        raise CertificateError("holds no PEM certificate")
    try:
        encoded = ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)].decode("ascii"))
        not_before, not_after = _validity(encoded)
        return not_before.timestamp(), not_after.timestamp()
    except (ValueError, IndexError, binascii.Error) as error:
        raise CertificateError("holds a certificate that cannot be read") from error


def _validity(encoded: bytes) -> tuple[datetime, datetime]:
    to_be_signed = _element(_element(encoded, _SEQUENCE)[0], _SEQUENCE)[0]
    if to_be_signed[0] == _VERSION:
        to_be_signed = _element(to_be_signed, _VERSION)[1]
    for _ in range(_BEFORE_VALIDITY):
        to_be_signed = _element(to_be_signed, to_be_signed[0])[1]
    validity = _element(to_be_signed, _SEQUENCE)[0]
    begin, rest = _element(validity, validity[0])
    return _time(validity[0], begin), _time(rest[0], _element(rest, rest[0])[0])


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
