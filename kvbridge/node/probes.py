"""Asking at commit whether a cache can be that of its tokens, for model versions with a fingerprint in the catalog."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbridge.core.catalog import Catalog, ModelEntry
from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.errors import BridgeError
from kvbridge.core.reasons import Reason
from kvbridge.node.verification import Verifier
from kvbridge.probe import Fingerprint, ProbeFinding, check_tokens, load_fingerprint

_log = logging.getLogger(__name__)

ProbedPayload = tuple[str, int]
"""Tenant, and the payload in its ledger."""
FINGERPRINTS_MAX = 16
"""Most fingerprints in memory; each takes tens of MiB at most."""
FINDINGS_MAX = 16_384
"""Most payloads whose figures are remembered."""

_FileVersion = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What a file held when it was last read."""

    version: _FileVersion
    """Inode, size and time of change of the file."""
    fingerprint: Fingerprint | BridgeError
    """What it held, or what is wrong with it."""


class Probes:
    """Checks tokens against caches. A fingerprint that the catalog names and that cannot be had lets nothing pass."""

    def __init__(self, *, catalog: Callable[[], Catalog], verifier: Verifier, sample_tokens: int) -> None:
        """Look up fingerprints in `catalog`, and look at `sample_tokens` on the threads of `verifier`; 0 for all."""
        self._catalog = catalog
        self._verifier = verifier
        self._sample_tokens = sample_tokens or None
        self._loaded: OrderedDict[ModelEntry, _Loaded] = OrderedDict()
        self._figures: OrderedDict[ProbedPayload, Mapping[str, float]] = OrderedDict()

    def __repr__(self) -> str:
        """Show how many fingerprints are loaded."""
        return f"<Probes, {len(self._loaded)} fingerprints loaded>"

    async def check(
        self, payload: ProbedPayload, descriptor: PayloadDescriptor, slot: memoryview
    ) -> tuple[Reason, str] | None:
        """Return why the bytes in `slot`, header included, cannot be the cache of the declared tokens, or None."""
        entry = self._catalog().model(descriptor.model)
        # What was aligned is not as its model made it, and no fingerprint says what it should look like.
        if entry is None or not entry.fingerprint or descriptor.aligner is not None:
            return None
        work = self._verifier.run(lambda: self._probe(entry, descriptor, slot))
        [finding] = await asyncio.gather(work, return_exceptions=True)
        if isinstance(finding, BridgeError):
            return Reason.PROBE_BELOW_THRESHOLD, f"the fingerprint of the model version cannot be used: {finding}"
        if isinstance(finding, BaseException):
            _log.error("a probe broke off", exc_info=finding)
            return Reason.PROBE_BELOW_THRESHOLD, "the probe broke off; the node's log says why"
        self._remember(payload, finding)
        return None if finding.problem is None else (Reason.PROBE_BELOW_THRESHOLD, finding.problem)

    def figures(self, payload: ProbedPayload) -> Mapping[str, float]:
        """Return what was measured of a payload at commit; empty if it was not probed, or that is forgotten."""
        return self._figures.get(payload, {})

    def _remember(self, payload: ProbedPayload, finding: ProbeFinding) -> None:
        if finding.figures:
            self._figures[payload] = dict(finding.figures)
        if len(self._figures) > FINDINGS_MAX:
            self._figures.popitem(last=False)

    def _probe(self, entry: ModelEntry, descriptor: PayloadDescriptor, slot: memoryview) -> ProbeFinding:
        fingerprint = self._load(entry)
        return check_tokens(
            fingerprint, descriptor, np.frombuffer(slot, dtype=np.uint8), sample_tokens=self._sample_tokens
        )

    def _load(self, entry: ModelEntry) -> Fingerprint:
        version = _version(entry.fingerprint)
        loaded = self._loaded.get(entry)
        if loaded is None or loaded.version != version:
            loaded = self._loaded[entry] = _Loaded(version=version, fingerprint=_read(entry))
            while len(self._loaded) > FINGERPRINTS_MAX:
                self._loaded.popitem(last=False)
        if isinstance(loaded.fingerprint, BridgeError):
            raise loaded.fingerprint
        return loaded.fingerprint


def _read(entry: ModelEntry) -> Fingerprint | BridgeError:
    try:
        return load_fingerprint(entry.fingerprint, model=entry.tag)
    except BridgeError as error:
        _log.exception("a fingerprint that the catalog names cannot be used", extra={"path": entry.fingerprint})
        return error


def _version(path: str) -> _FileVersion:
    try:
        status = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)
