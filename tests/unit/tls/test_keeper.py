"""Certificate files that change in every way that files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from kvbridge.tls import TlsFileError, TlsFiles, TlsKeeper, TlsMaterial, client_context, read_material, server_context
from tests.certificates import LOCAL, Authority, Secret

AUTHORITY = Authority()


@pytest.fixture(name="secret")
def mounted(tmp_path: Path) -> Secret:
    """Mount a secret."""
    return Secret(tmp_path / "secret", AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)


def files(secret: Secret) -> TlsFiles:
    """Return where everything lies."""
    return TlsFiles(certificate=secret.certificate, key=secret.key, ca=secret.ca)


def keeper(secret: Secret, *, poll_seconds: float = 0.01, warning_seconds: float = 0.0) -> TlsKeeper:
    """Keep it as a server does."""
    return TlsKeeper("server", files(secret), poll_seconds=poll_seconds, warning_seconds=warning_seconds)


def _set(taken: asyncio.Event, _: TlsMaterial) -> None:
    taken.set()


def look(kept: TlsKeeper) -> TlsMaterial | TlsFileError | None:
    """Look once and take what is found."""
    found = kept.look()
    kept.take(found)
    return found


def test_a_swapped_link_brings_everything_at_once(secret: Secret) -> None:
    """As Kubernetes updates a secret: the files' own links stay, and the one behind them changes."""
    kept = keeper(secret)
    swapped: list[TlsMaterial] = []
    first = kept.material
    kept.add_listener(swapped.append)
    assert look(kept) in (None, first)
    issued = AUTHORITY.issue(*LOCAL)
    secret.put(issued, AUTHORITY.certificate)
    look(kept)
    assert (kept.material.certificate, kept.material.key, kept.version) == (issued.certificate, issued.key, 2)
    assert swapped == [kept.material]
    assert (kept.standing().reloads, kept.standing().failures, kept.standing().problem) == (1, 0, "")


@pytest.mark.parametrize("damage", ["half", "empty", "mismatch", "junk", "gone", "folder", "encrypted", "expired"])
def test_what_cannot_be_used_changes_nothing(
    secret: Secret, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The last good pair stays, one failure is counted and told once, and the next good pair ends it."""
    kept = keeper(secret)
    good, other = kept.material, AUTHORITY.issue(*LOCAL)
    key = Path(secret.key).resolve()
    if damage == "expired":
        secret.put(AUTHORITY.issue(*LOCAL, lasts=-timedelta(hours=1)), AUTHORITY.certificate)
    elif damage in {"gone", "folder"}:
        key.unlink()
        if damage == "folder":
            key.mkdir()
    else:
        content = {
            "half": good.key[: len(good.key) // 2],
            "empty": b"",
            "mismatch": other.key,
            "junk": b"junk",
            "encrypted": good.key.replace(b"PRIVATE", b"ENCRYPTED PRIVATE"),
        }
        key.write_bytes(content[damage])
    for _ in range(3):
        look(kept)
    assert kept.material is good
    assert (kept.version, kept.standing().failures) == (1, 1)
    assert str(tmp_path) in kept.standing().problem
    [told] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "PRIVATE" not in told.getMessage() + str(vars(told))
    secret.put(other, AUTHORITY.certificate)
    look(kept)
    assert kept.material.key == other.key
    assert (kept.standing().problem, kept.standing().failures) == ("", 1)


def test_two_files_that_are_written_one_after_the_other_are_taken_together(secret: Secret) -> None:
    """A look between the two finds a pair that does not fit."""
    kept, other = keeper(secret), AUTHORITY.issue(*LOCAL)
    Path(secret.certificate).resolve().write_bytes(other.certificate)
    assert isinstance(look(kept), TlsFileError)
    Path(secret.key).resolve().write_bytes(other.key)
    look(kept)
    assert kept.material.certificate == other.certificate


def test_a_file_with_the_old_times_is_seen_by_its_content(secret: Secret) -> None:
    """Right after a write another may follow within the resolution of times."""
    kept, other = keeper(secret), AUTHORITY.issue(*LOCAL)
    times = Path(secret.key).stat()
    for path, content in ((secret.certificate, other.certificate), (secret.key, other.key)):
        Path(path).resolve().write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    look(kept)
    assert kept.material.certificate == other.certificate


async def test_files_are_looked_at_without_being_asked_and_at_once_when_told(secret: Secret) -> None:
    """By polling, or long before the next poll."""
    for poll_seconds in (0.01, 1000.0):
        kept = keeper(secret, poll_seconds=poll_seconds)
        kept.start()
        taken = asyncio.Event()
        kept.add_listener(partial(_set, taken))
        secret.put(AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
        if poll_seconds > 1:
            kept.look_soon()
        await asyncio.wait_for(taken.wait(), 30)
        await kept.close()


@pytest.mark.parametrize("missing", ["certificate", "key", "ca"])
def test_a_node_does_not_start_without_its_files(secret: Secret, missing: str) -> None:
    """The error names the file."""
    Path(getattr(secret, missing)).unlink()
    with pytest.raises(TlsFileError, match=Path(getattr(secret, missing)).name):
        keeper(secret)


async def test_a_certificate_about_to_expire_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not one that was issued for hours and has most of them left."""
    # Every certificate here has been valid for a day already.
    for lasts, warns in ((timedelta(hours=1), True), (timedelta(days=1), False), (-timedelta(hours=1), True)):
        caplog.clear()
        secret = Secret(tmp_path / str(lasts), AUTHORITY.issue(*LOCAL, lasts=lasts), AUTHORITY.certificate)
        kept = keeper(secret, warning_seconds=7 * 86_400)
        kept.start()
        kept.take(None)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warns
        await kept.close()


def test_keys_are_not_shown(secret: Secret) -> None:
    """Neither in what holds them nor in the error of a pair that does not fit."""
    material = read_material(files(secret))
    assert "PRIVATE" not in repr(material)
    assert "BEGIN" not in repr(material)
    Path(secret.key).resolve().write_bytes(AUTHORITY.issue(*LOCAL).key)
    mixed = read_material(files(secret))
    with pytest.raises(TlsFileError, match="cannot be used together") as refused:
        server_context(mixed, files(secret))
    assert "BEGIN" not in str(refused.value)


def test_authorities_may_be_named_between_their_certificates_in_any_writing(secret: Secret) -> None:
    """As the bundles of many systems do; a certificate with such a letter in it is none."""
    other = Authority("another one").certificate
    path = Path(secret.ca).resolve()
    path.write_bytes("# Főtanúsítvány\n".encode() + AUTHORITY.certificate + "# Türk\n".encode("latin-1") + other)
    for make in (server_context, client_context):
        assert len(make(read_material(files(secret)), files(secret)).get_ca_certs()) == 2
    path.write_bytes(AUTHORITY.certificate + other[:60] + b"\xe9" + other[60:])
    with pytest.raises(TlsFileError, match=r"ca\.crt|ca\.pem"):
        client_context(read_material(files(secret)), files(secret))


def test_nothing_older_than_tls_1_2_is_spoken(secret: Secret) -> None:
    """And only with forward secrecy and authenticated encryption."""
    material = read_material(files(secret))
    for context in (server_context(material, files(secret)), client_context(material, files(secret))):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        names = [cipher["name"] for cipher in context.get_ciphers()]
        assert all(name.startswith(("TLS_", "ECDHE-")) and ("GCM" in name or "CHACHA20" in name) for name in names)
    assert server_context(material, files(secret)).verify_mode is ssl.CERT_OPTIONAL
    assert server_context(material, files(secret), require_client=True).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(("mode", "told"), [(0o600, 0), (0o640, 0), (0o644, 2)])
async def test_a_key_that_everybody_may_read_is_warned_of(
    secret: Secret, caplog: pytest.LogCaptureFixture, mode: int, told: int
) -> None:
    """At the start and with each new key; it is used all the same."""
    os.chmod(secret.key, mode)  # noqa: PTH101 - a path is not for coroutines
    kept = keeper(secret)
    kept.start()
    await kept.close()
    secret.put(AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
    os.chmod(secret.key, mode)  # noqa: PTH101
    assert isinstance(look(kept), TlsMaterial)
    assert [vars(record)["file"] for record in caplog.records if "private key" in record.message] == [secret.key] * told
