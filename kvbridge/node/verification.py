"""Checking bytes: digests, finite values, and zeroes where nothing may be.

The work runs on worker threads, off the event loop and in parallel over layers; xxhash and numpy release the
interpreter lock while they read. A strip is digested and then scanned while it is still in the processor's cache, so
that the full check costs little more than one pass over memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash

from kvbridge.core.descriptor import PayloadDescriptor, Verification
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Region, slot_layout
from kvbridge.core.reasons import Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_BLOCK_BYTES = 2 << 20
"""How much is digested and then scanned before the next bytes."""
_EXPONENTS = {
    Dtype.FLOAT32: (np.uint32, np.uint32(0x7F80_0000)),
    Dtype.FLOAT16: (np.uint16, np.uint16(0x7C00)),
    Dtype.BFLOAT16: (np.uint16, np.uint16(0x7F80)),
}
"""For each element type an integer of its size, and the bits of its exponent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFinding:
    """What the bytes of a payload were found to be."""

    layer_digests: tuple[bytes, ...] = ()
    """XXH3-128 of each layer's canonical bytes, in layer order; empty if they were not digested."""
    failure: tuple[Reason, str] | None = None
    """The first thing that is wrong, with a sentence for people."""


class Verifier:
    """Runs byte checks on a fixed number of threads."""

    def __init__(self, threads: int) -> None:
        """Start nothing yet; threads come with the first work."""
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvbridge-verify")

    async def check(
        self, slot: memoryview, descriptor: PayloadDescriptor, *, level: Verification, zero_padding: bool
    ) -> ByteFinding:
        """Check the payload in `slot` (header included) against its descriptor.

        Declared digests are compared where there are any. With `zero_padding` everything past the valid length is
        overwritten with zeroes, which no digest covers.
        """
        layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
        if level is Verification.NONE and not (
            zero_padding and any(region.has_padding(descriptor.valid_length) for region in layout.regions)
        ):
            return ByteFinding()
        layers = [tuple(regions) for _, regions in groupby(layout.regions, key=lambda region: region.layer)]
        job = _Job(
            slot=np.frombuffer(slot, dtype=np.uint8), descriptor=descriptor, level=level, zero_padding=zero_padding
        )
        shares = [layers[first :: self._threads] for first in range(min(self._threads, len(layers)))]
        done = await self._all_done(job, shares)
        if done is None:
            return ByteFinding(
                failure=(Reason.PAYLOAD_CORRUPT, "the bytes could not be checked; the node's log says why")
            )
        found = {finding.layer: finding for findings in done for finding in findings}
        return _combine([found[layer] for layer in descriptor.geometry.layers], descriptor)

    async def _all_done(
        self, job: _Job, shares: Sequence[Sequence[tuple[Region, ...]]]
    ) -> list[list[_LayerFinding]] | None:
        """Wait for every share, so that none touches the slot any more, and return None if one broke off."""
        loop = asyncio.get_running_loop()
        started: list[asyncio.Future[list[_LayerFinding]]] = []
        broken: list[BaseException] = []
        try:
            for share in shares:
                future = loop.run_in_executor(self._executor, job.check_layers, share)
                started.append(future)  # Appended one by one: what has started must be known if the next cannot.
        except RuntimeError as error:  # What the executor raises when the system gives it no thread.
            broken.append(error)
        done = await asyncio.gather(*started, return_exceptions=True)
        broken += [found for found in done if isinstance(found, BaseException)]
        for problem in broken:
            _log.error("checking bytes broke off", exc_info=problem)
        return None if broken else [found for found in done if not isinstance(found, BaseException)]

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Do other work on the same threads; what it raises is raised here."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let running work end and take no more."""
        self._executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFinding:
    layer: int
    digest: bytes | None
    not_finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    slot: NDArray[np.uint8]
    descriptor: PayloadDescriptor
    level: Verification
    zero_padding: bool

    def check_layers(self, layers: Sequence[tuple[Region, ...]]) -> list[_LayerFinding]:
        return [self._check_layer(regions) for regions in layers]

    def _check_layer(self, regions: tuple[Region, ...]) -> _LayerFinding:
        digest = xxhash.xxh3_128() if self.level.includes(Verification.DIGEST) else None
        finite = True
        for region in regions:
            strips = self.slot[region.offset_bytes : region.offset_bytes + region.length_bytes]
            strips = strips.reshape(region.strip_count, region.strip_stride_bytes)
            stored_bytes = region.stored_strip_bytes(self.descriptor.valid_length)
            if self.zero_padding:
                strips[:, stored_bytes:] = 0
            if self.level is Verification.NONE:
                continue
            for block in _blocks(strips[:, :stored_bytes]):
                if digest is not None:
                    for row in block:
                        digest.update(row.data)
                if self.level is Verification.FULL:
                    finite = finite and all_finite(block, region.group.dtype)
        return _LayerFinding(
            layer=regions[0].layer, digest=None if digest is None else digest.digest(), not_finite=not finite
        )


def _blocks(stored: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Yield the strips' bytes in order, in blocks that a processor's cache holds from one check to the next.

    A block is a piece of one row if no padding lies between the strips, else some whole strips.
    """
    if stored.flags.c_contiguous:
        flat = stored.reshape(1, -1)
        for start in range(0, flat.shape[1], _BLOCK_BYTES):
            yield flat[:, start : start + _BLOCK_BYTES]
    else:
        strips_max = max(_BLOCK_BYTES // stored.shape[1], 1)
        for first in range(0, stored.shape[0], strips_max):
            yield stored[first : first + strips_max]


def all_finite(values: NDArray[np.uint8], dtype: Dtype) -> bool:
    """Tell whether every value in these bytes is neither NaN nor infinite.

    Those two, and no others, have all bits of the exponent set (IEEE 754-2019, 3.4; bfloat16 has the exponent of
    float32). So the bits are looked at as integers, which is exact and needs no arithmetic on what may be anything.
    """
    word, exponent = _EXPONENTS[dtype]
    return bool((values.view(word) & exponent).max(initial=word(0)) < exponent)


def _combine(findings: Sequence[_LayerFinding], descriptor: PayloadDescriptor) -> ByteFinding:
    digests = tuple(finding.digest for finding in findings if finding.digest is not None)
    declared = descriptor.layer_digests
    wrong = [
        finding.layer
        for finding, expected in zip(findings, declared, strict=False)
        if finding.digest is not None and finding.digest != expected
    ]
    if wrong:
        return ByteFinding(
            layer_digests=digests,
            failure=(Reason.PAYLOAD_CORRUPT, f"digests differ from the declared ones in {_layers(wrong)}"),
        )
    not_finite = [finding.layer for finding in findings if finding.not_finite]
    if not_finite:
        return ByteFinding(
            layer_digests=digests,
            failure=(
                Reason.VALUES_NOT_FINITE,
                f"NaN or infinite values within the valid length in {_layers(not_finite)}",
            ),
        )
    return ByteFinding(layer_digests=digests)


def _layers(layers: Sequence[int]) -> str:
    shown = ", ".join(str(layer) for layer in layers[:8])
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{', ...' if len(layers) > 8 else ''}"  # noqa: PLR2004
