"""The files that secure connections: read together, and taken together or not at all."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field

from kvbridge.core.errors import BridgeError
from kvbridge.files import UnreadableFileError, read_bytes
from kvbridge.tls.certificate import KEY_KINDS, CertificateError, key_kind_of, validity_of

FILE_BYTES_MAX = 1 << 20
"""Largest file that is read: thousands of certificates."""


class TlsFileError(BridgeError):
    """A certificate, key or CA file cannot be used; what it says names files and never repeats what is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where everything lies; PEM files, empty paths where there is none."""

    certificate: str = ""
    """Certificates: one's own first, then those of the authorities between it and the root."""
    key: str = ""
    """Its private key, not encrypted."""
    ca: str = ""
    """Certificates of the authorities by which others' certificates are verified."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the files that there are."""
        return tuple(path for path in (self.certificate, self.key, self.ca) if path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What was in them at one moment, checked to belong together."""

    certificate: bytes = field(default=b"", repr=False)
    """The chain of certificates; empty if there is none."""
    key: bytes = field(default=b"", repr=False)
    """Its private key."""
    ca: bytes = field(default=b"", repr=False)
    """The authorities; empty if there are none."""
    valid_from: float = 0.0
    """From when the certificate is valid, in seconds of Unix time."""
    expires_at: float | None = None
    """When the certificate expires; None if there is none."""

    def is_expired(self) -> bool:
        """Tell whether the certificate is of no use any more."""
        return self.expires_at is not None and self.expires_at <= time.time()

    def is_early(self) -> bool:
        """Tell whether the certificate is of no use yet."""
        return self.valid_from > time.time()


def read_material(files: TlsFiles) -> TlsMaterial:
    """Read everything.

    Raises:
        TlsFileError: a file cannot be read, or holds nothing of its kind.
    """
    certificate, key, ca = (read_file(path) if path else b"" for path in (files.certificate, files.key, files.ca))
    for path, content in ((files.certificate, certificate), (files.ca, ca)):
        if content:
            _require_certificate(path, content)
    if b"ENCRYPTED" in key:
        raise TlsFileError(f"{files.key}: the key is encrypted; nobody is there to give a password")
    if not certificate:
        return TlsMaterial(ca=ca)
    _require_key_kind(files.certificate, certificate)
    valid_from, expires_at = validity_of(certificate)
    return TlsMaterial(certificate=certificate, key=key, ca=ca, valid_from=valid_from, expires_at=expires_at)


def read_file(path: str) -> bytes:
    """Return what is in a file.

    Raises:
        TlsFileError: it is no file that can be read, is empty or is too large.
    """
    try:
        content = read_bytes(path, FILE_BYTES_MAX)
    except UnreadableFileError as error:
        raise TlsFileError(f"{path}: {error}") from error
    if not 0 < len(content) <= FILE_BYTES_MAX:
        raise TlsFileError(f"{path}: must hold 1 to {FILE_BYTES_MAX} bytes")
    return content


def is_open_to_others(path: str) -> bool:
    """Tell whether a file's own mode lets every user of the host read it; False if nobody can say."""
    try:
        return bool(os.stat(path).st_mode & stat.S_IROTH)  # noqa: PTH116 - any kind of file
    except (OSError, ValueError):
        return False


def _require_key_kind(path: str, certificate: bytes) -> None:
    try:
        kind = key_kind_of(certificate)
    except CertificateError as error:
        raise TlsFileError(f"{path}: {error}") from error
    if kind not in KEY_KINDS:
        good = ", ".join(sorted(KEY_KINDS))
        raise TlsFileError(f"{path}: a key of the kind {kind} is none that gRPC takes; those are {good}")


def _require_certificate(path: str, content: bytes) -> None:
    try:
        validity_of(content)
    except CertificateError as error:
        raise TlsFileError(f"{path}: {error}") from error
