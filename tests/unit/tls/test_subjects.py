"""Whom certificates name, by what a library of certificates says."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.tls import CertificateError, names_in, names_in_pem
from kvbridge.tls.certificate import extension_of
from tests.certificates import MAIL, Authority, Issued
from tests.odd_certificates import BAD_KEYS, DNS, URI, issue, issue_raw

AUTHORITY = Authority()
USUAL = AUTHORITY.issue("a.example", "spiffe://cluster/a", "10.0.0.1", f"{MAIL}b.example", common_name="c.example")
LABEL = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=20)


def der(issued: Issued) -> bytes:
    """Return a certificate in its other form."""
    return ssl.PEM_cert_to_DER_cert(issued.certificate.decode())


def test_names_of_other_kinds_are_none() -> None:
    """Addresses, of mail or not, and the subject's own name."""
    assert names_in(der(USUAL)) == names_in_pem(USUAL.certificate) == {"a.example", "spiffe://cluster/a"}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([(DNS, b"a.example\0.other.example")], set()),
        ([(DNS, b"a.example\0")], set()),
        ([(URI, b"spiffe://a\0b"), (DNS, b"good.example")], {"good.example"}),
        ([(DNS, "bücher.example".encode()), (DNS, b"xn--bcher-kva.example")], {"xn--bcher-kva.example"}),
        ([(DNS, b"\xff\xfe")], set()),
        ([(DNS, b"with space.example"), (DNS, b"line\nend.example"), (DNS, b"")], set()),
        ([(DNS, b"a.example"), (DNS, b"a.example"), (URI, b"a.example")], {"a.example"}),
        ([(0x81, b"mail@a.example"), (0x87, b"\x0a\0\0\1"), (0x88, b"\x2a\x03")], set()),
        ([(DNS, b"x" * 300)], {"x" * 300}),
        ([], set()),
    ],
)
def test_a_name_is_a_name_as_a_whole_or_none(names: list[tuple[int, bytes]], found: set[str]) -> None:
    """Nothing is cut off, decoded in another way or put together."""
    assert names_in(der(issue_raw(AUTHORITY, names))) == found


@given(st.lists(LABEL, min_size=1, max_size=5, unique=True))
def test_every_usual_name_is_found(names: list[str]) -> None:
    """However many there are."""
    assert names_in(der(issue(AUTHORITY, *names))) == set(names)


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_they_stand_behind_keys_of_every_kind(kind: str) -> None:
    """And of every length."""
    assert names_in(der(issue(AUTHORITY, "a.example", key=BAD_KEYS[kind]()))) == {"a.example"}


def test_without_names_nobody_is_named() -> None:
    """An authority's own certificate, for one."""
    assert names_in_pem(AUTHORITY.certificate) == set()
    with pytest.raises(CertificateError):
        extension_of(ssl.PEM_cert_to_DER_cert(AUTHORITY.certificate.decode()), "551d11")


@pytest.mark.parametrize("pem", [b"", b"junk", b"\xff" * 100, USUAL.certificate[:-60]])
def test_what_is_no_certificate_names_nobody(pem: bytes) -> None:
    """Nor raises anything."""
    assert names_in_pem(pem) == set()


@given(at=st.integers(0, len(der(USUAL)) - 1), byte=st.integers(0, 255))
def test_a_damaged_certificate_raises_nothing(at: int, byte: int) -> None:
    """Whatever a byte is changed to."""
    damaged = bytearray(der(USUAL))
    damaged[at] = byte
    assert all(name.isascii() for name in names_in(bytes(damaged)))
    with suppress(CertificateError):
        extension_of(bytes(damaged[: at + 1]), "551d11")
