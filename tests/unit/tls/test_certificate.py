"""How long certificates are valid, by what a library of certificates says."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.tls import CertificateError, validity_of
from tests.certificates import Authority

KEY = ed25519.Ed25519PrivateKey.generate()
CERTIFICATE = Authority().issue("a.example").certificate
TIMES = st.datetimes(datetime(1950, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - the strategy adds it


def certificate(begin: datetime, end: datetime, *, names: int = 1) -> x509.Certificate:
    """Return one that is valid between these times, with as many parts in its names."""
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "x" * 60)] * names)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(KEY.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.sign(KEY, None)


@given(begin=TIMES, seconds=st.integers(1, 10**8), names=st.integers(0, 10))
def test_any_validity_is_read(begin: datetime, seconds: int, names: int) -> None:
    """In both encodings of times, behind names of any length."""
    made = certificate(begin, begin + timedelta(seconds=seconds), names=names)
    expected = made.not_valid_before_utc.timestamp(), made.not_valid_after_utc.timestamp()
    assert validity_of(made.public_bytes(serialization.Encoding.PEM)) == expected


def test_a_large_certificate_is_read() -> None:
    """Keys and extensions that come behind the validity do not matter, nor what stands around the first one."""
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "large")])
    begin = datetime(2030, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(begin).not_valid_after(begin + timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.DNSName(f"{n}.example") for n in range(500)])
    made = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    pem = b"a comment\n" + made.public_bytes(serialization.Encoding.PEM) + CERTIFICATE
    assert validity_of(pem) == (begin.timestamp(), begin.timestamp() + 86_400)


@given(at=st.integers(0, len(CERTIFICATE) - 1), byte=st.integers(0, 255))
def test_a_damaged_certificate_raises_nothing_else(at: int, byte: int) -> None:
    """Whatever a byte is changed to, there is an answer or the one error."""
    damaged = bytearray(CERTIFICATE)
    damaged[at] = byte
    with suppress(CertificateError):
        assert len(validity_of(bytes(damaged))) == 2


@pytest.mark.parametrize("pem", [b"", b"junk", CERTIFICATE[:-60], CERTIFICATE[40:], b"\xff" * 100])
def test_what_is_no_certificate_is_refused(pem: bytes) -> None:
    """Half of one, too."""
    with pytest.raises(CertificateError):
        validity_of(pem)
