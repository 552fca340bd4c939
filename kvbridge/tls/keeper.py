"""Keeps the newest good content of a set of files while they are rotated.

1. Files are looked at every few seconds, and at once when somebody says so. Symbolic links are followed, so the swap of
   one link by which Kubernetes updates a secret is seen like any other change.
2. All files are read together. If any of them changed meanwhile, the verdict waits for the next look.
3. What cannot be used (half a file, a key of another certificate or of a kind that gRPC does not take, a certificate
   that has expired or is not yet valid while the one in use is good) changes nothing but the count of failures; the
   content in use stays until there is a better one, or the new one has become good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvbridge.files import Poller, Signature, is_settled, signature_of
from kvbridge.tls.contexts import client_context, server_context
from kvbridge.tls.files import TlsFileError, TlsFiles, TlsMaterial, is_open_to_others, read_material

_WARN_AGAIN_SECONDS = 3600.0
_WARNING_SHARE_MAX = 0.2
"""Certificates that last for hours are renewed every few hours."""

_log = logging.getLogger(__name__)

_Signatures: TypeAlias = tuple[Signature | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsStanding:
    """How a set of files stands at one moment."""

    purpose: str
    """What it is for: `server` or `peer`."""
    expires_at: float | None
    """When the certificate in use expires, in seconds of Unix time; None if there is none."""
    reloads: int
    """How often other content was taken into use."""
    failures: int
    """How often new content could not be used."""
    problem: str
    """Why the newest content is not in use; empty if it is."""


class TlsKeeper:
    """One set of files. All but `look` happens on one thread; what is in use may be read from any."""

    def __init__(self, purpose: str, files: TlsFiles, *, poll_seconds: float, warning_seconds: float) -> None:
        """Read `files` for the first time; warn so long before the certificate in use expires.

        Raises:
            TlsFileError: they cannot be used.
        """
        self.purpose = purpose
        self.files = files
        self.version = 1
        """Counts the contents that were taken into use."""
        self._warning_seconds = warning_seconds
        self._failures = 0
        self._problem = ""
        self._warned_at = -_WARN_AGAIN_SECONDS
        self._poller = Poller(
            f"certificate files of the {purpose}", look=self.look, take=self.take, seconds=poll_seconds
        )
        self._listeners: list[Callable[[TlsMaterial], None]] = []
        before = self._stat()
        self.material = self._checked(read_material(files))
        """What is in use."""
        self._signature = _settled(before)

    def __repr__(self) -> str:
        """Show what it is for, and whether the newest content is in use."""
        problem = ", newest content refused" if self._problem else ""
        return f"<TlsKeeper for {self.purpose}: version {self.version}{problem}>"

    def start(self) -> None:
        """Begin to look at the files."""
        self._warn_of_what_is_early()
        self._warn_of_expiry()
        self._warn_of_readers()
        self._poller.start()

    async def close(self) -> None:
        """Stop looking."""
        await self._poller.close()

    def add_listener(self, listener: Callable[[TlsMaterial], None]) -> None:
        """Call `listener` whenever other content is taken into use."""
        self._listeners.append(listener)

    def look_soon(self) -> None:
        """Look at the files without waiting for the next time."""
        self._poller.look_soon()

    def standing(self) -> TlsStanding:
        """Return how the files stand."""
        return TlsStanding(
            purpose=self.purpose,
            expires_at=self.material.expires_at,
            reloads=self.version - 1,
            failures=self._failures,
            problem=self._problem,
        )

    def look(self) -> TlsMaterial | TlsFileError | None:
        """Return what is new: good content, or why the content is refused; None if nothing is. Takes time."""
        before = self._stat()
        if before is not None and before == self._signature:
            return None
        try:
            found = self._checked(read_material(self.files))
        except TlsFileError as error:
            self._signature = None
            return error if self._stat() == before else None
        if self._stat() != before:
            self._signature = None
            return None
        self._signature = _settled(before)
        return found

    def take(self, found: TlsMaterial | TlsFileError | None) -> None:
        """Take what a look has found into use, if it can be."""
        if isinstance(found, TlsMaterial) and (problem := self._worse_than_now(found)):
            self._signature = None  # It may become good without changing, or what is in use become as bad.
            found = TlsFileError(f"{self.files.certificate}: the certificate {problem}")
        if isinstance(found, TlsFileError):
            self._refuse(str(found))
        elif found is not None:
            self._problem = ""
            if found != self.material:
                self._swap(found)
        self._warn_of_expiry()

    # Inside

    def _checked(self, material: TlsMaterial) -> TlsMaterial:
        context = server_context if self.purpose == "server" else client_context
        context(material, self.files)
        return material

    def _worse_than_now(self, found: TlsMaterial) -> str:
        """Return why a certificate is not good while the one in use is; empty if it may be used."""
        if self.material.is_expired() or self.material.is_early():
            return ""
        return "has expired" if found.is_expired() else "is not yet valid" if found.is_early() else ""

    def _refuse(self, problem: str) -> None:
        if problem == self._problem:
            return  # It was told already; a file that stays bad is one failure.
        self._problem = problem
        self._failures += 1
        _log.error("certificate files refused; what is in use stays", extra={"for": self.purpose, "problem": problem})

    def _swap(self, material: TlsMaterial) -> None:
        self.material = material
        self.version += 1
        self._warned_at = -_WARN_AGAIN_SECONDS
        for listener in self._listeners:
            listener(material)
        self._warn_of_readers()
        _log.info(
            "certificate files changed",
            extra={"for": self.purpose, "version": self.version, "expires_at": material.expires_at},
        )

    def _warn_of_what_is_early(self) -> None:
        if self.material.is_early():
            _log.warning(
                "the certificate is not yet valid",
                extra={
                    "for": self.purpose,
                    "file": self.files.certificate,
                    "seconds_left": round(self.material.valid_from - time.time()),
                },
            )

    def _warn_of_expiry(self) -> None:
        expires_at, now = self.material.expires_at, time.monotonic()
        if expires_at is None or now - self._warned_at < _WARN_AGAIN_SECONDS:
            return
        left, valid_seconds = expires_at - time.time(), expires_at - self.material.valid_from
        if left < min(self._warning_seconds, valid_seconds * _WARNING_SHARE_MAX):
            self._warned_at = now
            _log.warning(
                "the certificate %s",
                "expires soon" if left > 0 else "has expired",
                extra={"for": self.purpose, "file": self.files.certificate, "seconds_left": round(left)},
            )

    def _warn_of_readers(self) -> None:
        if self.files.key and is_open_to_others(self.files.key):
            _log.warning("every user of this host may read a private key", extra={"file": self.files.key})

    def _stat(self) -> _Signatures | None:
        """Return the signature of each file, None if one of them is not there."""
        found = tuple(map(signature_of, self.files.paths))
        return None if None in found else found


def _settled(signatures: _Signatures | None) -> _Signatures | None:
    """Return them if they tell this content from whatever is written next."""
    return signatures if signatures is not None and all(map(is_settled, signatures)) else None
