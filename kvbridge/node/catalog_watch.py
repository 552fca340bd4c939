"""Looks at a catalog file and finds out, cheaply, whether it says something new.

1. If the file behind the path, symbolic links followed, is the one seen last, by device, inode, size and times, nothing
   is new. So the swap of a link by which Kubernetes updates a ConfigMap is seen like any other change.
2. Otherwise it is read. If it changed while it was read, the verdict waits for the next look.
3. A file that was written a moment ago could be written once more within the resolution of its time stamp, so it is
   read again at the next look although it seems unchanged.
4. The same bytes as last time are not judged again, whatever the times say.
"""

from __future__ import annotations

import hashlib

from kvbridge.catalog_file import CatalogFileError, read_bytes, read_catalog
from kvbridge.core.catalog import Catalog, RoutePolicy
from kvbridge.files import Signature, is_settled, signature_of


class WatchedFile:
    """One file. It is looked at from one thread at a time."""

    def __init__(self, path: str, built_in: RoutePolicy | None = None) -> None:
        """Watch what `path` leads to; where its defaults leave something out, `built_in` holds."""
        self._path = path
        self._built_in = built_in
        self._signature: Signature | None = None
        self._judged = b""
        self._good: tuple[bytes, Catalog] | None = None

    def look(self) -> Catalog | CatalogFileError | None:
        """Return what is new: a catalog, or why the content is refused; None if nothing is.

        The content of the newest good look gives the same object again.
        """
        before = signature_of(self._path)
        if before is not None and before == self._signature:
            return None
        try:
            content = read_bytes(self._path)
        except CatalogFileError as error:
            self._signature = None
            return error if self._is_news(str(error).encode("utf-8", "replace")) else None
        after = signature_of(self._path)
        if after != before and self._judged:
            return None
        self._signature = after if is_settled(after) else None
        return self._judge(content) if self._is_news(content) else None

    def _judge(self, content: bytes) -> Catalog | CatalogFileError:
        if self._good is not None and self._good[0] == self._judged:
            return self._good[1]
        try:
            catalog = read_catalog(content, self._path, self._built_in)
        except CatalogFileError as error:
            return error
        self._good = (self._judged, catalog)
        return catalog

    def _is_news(self, content: bytes) -> bool:
        digest = hashlib.blake2b(content, digest_size=16).digest()
        known, self._judged = digest == self._judged, digest
        return not known
