"""Looks at an access file and its files of tokens, and finds out, cheaply, whether they say something new.

1. If all the files, symbolic links followed, are those seen last, by device, inode, size and times, nothing is new.
2. Otherwise all of them are read. If one changed while it was read, the verdict waits for the next look.
3. A file that was written a moment ago could be written once more within the resolution of its time stamp, so it is
   read again at the next look although it seems unchanged. So are files that were refused, some of which may be absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeAlias

from kvbridge.access_file import AccessFileError, load_access_file
from kvbridge.core.access import AccessPolicy
from kvbridge.files import Signature, is_settled, signature_of
from kvbridge.tls import is_open_to_others

_log = logging.getLogger(__name__)

_Signatures: TypeAlias = tuple[Signature | None, ...]


class WatchedAccess:
    """One access file. It is looked at from one thread at a time."""

    def __init__(self, path: str) -> None:
        """Watch what `path` leads to."""
        self._path = path
        self._files: tuple[str, ...] = (path,)
        self._signatures: _Signatures | None = None
        self._told: AccessPolicy | str | None = None
        self._warned_of: set[str] = set()

    def look(self) -> AccessPolicy | AccessFileError | None:
        """Return what is new: a policy, or why the content is refused; None if nothing is."""
        before = _signatures(self._files)
        if before == self._signatures:
            return None
        self._signatures = None
        try:
            loaded = load_access_file(self._path)
        except AccessFileError as error:
            return self._tell(error)
        if self._told is not None and _signatures(self._files) != before:
            return None
        self._files = (self._path, *loaded.token_files)
        self._warn_of_readers()
        after = _signatures(self._files)
        self._signatures = after if all(map(is_settled, after)) else None
        return self._tell(loaded.policy)

    def _warn_of_readers(self) -> None:
        for path in sorted(set(self._files[1:]) - self._warned_of):
            if is_open_to_others(path):
                self._warned_of.add(path)
                _log.warning("every user of this host may read a file of tokens", extra={"file": path})

    def _tell(self, found: AccessPolicy | AccessFileError) -> AccessPolicy | AccessFileError | None:
        told = str(found) if isinstance(found, AccessFileError) else found
        if told == self._told:
            return None
        self._told = told
        return found


def _signatures(paths: Iterable[str]) -> _Signatures:
    return tuple(map(signature_of, paths))
