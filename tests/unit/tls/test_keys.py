"""Keys of every kind, and certificates at the wrong time: what a node takes, and what it keeps instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from kvbridge.tls import (
    KEY_KINDS,
    CertificateError,
    TlsFileError,
    TlsFiles,
    TlsKeeper,
    TlsMaterial,
    key_kind_of,
    read_material,
)
from tests.certificates import LOCAL, Authority, Secret
from tests.odd_certificates import BAD_KEYS, GOOD_KEYS, issue

AUTHORITY = Authority()
DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)


@pytest.fixture(name="secret")
def mounted(tmp_path: Path) -> Secret:
    """Mount a secret that is good."""
    return Secret(tmp_path / "secret", AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)


def files(secret: Secret) -> TlsFiles:
    """Return where everything lies."""
    return TlsFiles(certificate=secret.certificate, key=secret.key, ca=secret.ca)


def kept(secret: Secret) -> TlsKeeper:
    """Keep it as a server does."""
    return TlsKeeper("server", files(secret), poll_seconds=1000.0, warning_seconds=0.0)


def look(keeper: TlsKeeper) -> None:
    """Look once and take what is found."""
    keeper.take(keeper.look())


def test_the_kinds_that_are_taken_are_those_that_are_tested() -> None:
    """Every one of them, by a handshake elsewhere."""
    assert set(GOOD_KEYS) == KEY_KINDS


@pytest.mark.parametrize("kind", [*GOOD_KEYS, *BAD_KEYS])
def test_the_kind_of_a_key_is_told(kind: str) -> None:
    """By its name."""
    made = (GOOD_KEYS | BAD_KEYS)[kind]
    assert key_kind_of(issue(AUTHORITY, "localhost", key=made()).certificate) == kind


@pytest.mark.parametrize("pem", [b"", b"junk", AUTHORITY.certificate[:-60], b"\xff" * 100])
def test_what_is_no_certificate_has_no_kind(pem: bytes) -> None:
    """Half of one, too."""
    with pytest.raises(CertificateError):
        key_kind_of(pem)


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_key_that_grpc_does_not_take_is_refused_by_its_name(secret: Secret, kind: str) -> None:
    """At the start, and while the node runs, where what is in use stays."""
    keeper = kept(secret)
    good = keeper.material
    secret.put(issue(AUTHORITY, "localhost", key=BAD_KEYS[kind]()), AUTHORITY.certificate)
    with pytest.raises(TlsFileError, match=f"tls.crt: a key of the kind {kind} is none that gRPC takes"):
        read_material(files(secret))
    for _ in range(3):
        look(keeper)
    assert keeper.material is good
    assert keeper.standing().failures == 1
    assert kind in keeper.standing().problem


@pytest.mark.parametrize("kind", GOOD_KEYS)
def test_one_that_it_takes_is_used(secret: Secret, kind: str) -> None:
    """Whatever the one before it was."""
    keeper, issued = kept(secret), issue(AUTHORITY, "localhost", key=GOOD_KEYS[kind]())
    secret.put(issued, AUTHORITY.certificate)
    look(keeper)
    assert keeper.material.certificate == issued.certificate


class Racing(TlsKeeper):
    """Sees its files replaced while it reads them, so that the certificate is an old one and the key a new one."""

    swap: Callable[[], object] | None = None

    def _checked(self, material: TlsMaterial) -> TlsMaterial:
        if self.swap is None:
            return super()._checked(material)
        swap, self.swap = self.swap, None
        swap()
        raise TlsFileError("cannot be used together")


def test_what_was_read_while_files_changed_is_no_failure(secret: Secret) -> None:
    """Half of the old and half of the new is nobody's mistake; the next look finds the new."""
    keeper = Racing("server", files(secret), poll_seconds=1000.0, warning_seconds=0.0)
    secret.put(AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
    last = AUTHORITY.issue(*LOCAL)
    keeper.swap = lambda: secret.put(last, AUTHORITY.certificate)
    look(keeper)
    assert (keeper.standing().failures, keeper.standing().problem) == (0, "")
    look(keeper)
    assert keeper.material.certificate == last.certificate


def test_a_certificate_that_is_not_yet_valid_waits_for_its_time(secret: Secret) -> None:
    """What is in use is good until then; afterwards nobody has to touch the files."""
    keeper = kept(secret)
    good, early = keeper.material, issue(AUTHORITY, "localhost", begins=timedelta(seconds=1), lasts=DAY)
    secret.put(early, AUTHORITY.certificate)
    look(keeper)
    assert keeper.material is good
    assert "is not yet valid" in keeper.standing().problem
    while keeper.material is good:
        look(keeper)
    assert keeper.material.certificate == early.certificate
    assert (keeper.standing().failures, keeper.standing().reloads, keeper.standing().problem) == (1, 1, "")


@pytest.mark.parametrize(
    ("begins", "lasts", "told"),
    [(MINUTE, DAY, "the certificate is not yet valid"), (-2 * DAY, -DAY, "the certificate has expired")],
)
async def test_a_certificate_at_the_wrong_time_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: timedelta, lasts: timedelta, told: str
) -> None:
    """A node starts with it, because its local clients need none; the first good one takes its place."""
    secret = Secret(
        tmp_path / "secret", issue(AUTHORITY, "localhost", begins=begins, lasts=lasts), AUTHORITY.certificate
    )
    keeper = kept(secret)
    keeper.start()
    await keeper.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [told]
    good = AUTHORITY.issue(*LOCAL)
    secret.put(good, AUTHORITY.certificate)
    look(keeper)
    assert keeper.material.certificate == good.certificate
