"""A payload's layers as frames of fewer bytes: what an owner sends, and what another node makes of it.

The stream holds one frame for each layer, in order, and nothing else:

    flag (1 byte)    content    digest (16 bytes)

1. The length of every frame follows from geometry, valid length and form alone, so both sides know it beforehand.
2. The content of a layer that keeps all bits is its canonical bytes. Otherwise it is what `quantise.encode` makes of K
   and then of V, each as [heads, tokens, channels] whatever the order in memory. A layer keeps all bits if it is one of
   the first, if its values are stored with scales already, or if it would not become smaller.
3. The digest is XXH3-128 over the owner's sealed digest of the layer, the encoding's name, the layer's index, the flag
   and the content. So a frame of another payload, layer or form is refused, too. The owner digests the bytes that it
   writes a frame of, and sends nothing if they are not what was sealed.
4. The flag is 0. It is 1, and the content zero, where a value is not finite and has no scale: such a payload can only
   be sent with all its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import xxhash

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype
from kvbridge.core.layout import Region, slot_layout
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm
from kvbridge.transform.quantise import Floats, decode, encode, encoded_bytes, from_floats, to_floats

ENCODINGS = (TransferEncoding.INT8, TransferEncoding.INT4)
"""What this release can write and read besides the exact bytes."""
DIGEST_BYTES = 16
"""Length of a frame's digest."""
_CODED, _NOT_FINITE = b"\0", b"\1"
_DTYPES = frozenset({Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16})
_INDEX_BYTES = 4


class NotFiniteError(BridgeError):
    """A layer holds values that have no scale; the payload can only be sent with all its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFrame:
    """How one layer is written."""

    layer: int
    """Index of the layer in the model."""
    regions: tuple[Region, ...]
    """K, and then V."""
    valid_length: int
    """The payload's valid tokens."""
    encoding: TransferEncoding
    """How many bits its values take."""

    @property
    def exact_bytes(self) -> int:
        """Return how many canonical bytes the layer has."""
        return sum(_stored_bytes(region, self.valid_length) for region in self.regions)

    @property
    def content_bytes(self) -> int:
        """Return how many bytes the content has."""
        if self.encoding is TransferEncoding.EXACT:
            return self.exact_bytes
        return sum(self._encoded_bytes(region) for region in self.regions)

    @property
    def frame_bytes(self) -> int:
        """Return how many bytes the frame has."""
        return len(_CODED) + self.content_bytes + DIGEST_BYTES

    def write(self, canonical: bytes | bytearray, sealed: bytes) -> bytes:
        """Return the frame of a layer's canonical bytes, whose digest is `sealed`.

        Raises:
            InvalidFieldError: they are not what was sealed.
        """
        if len(canonical) != self.exact_bytes or xxhash.xxh3_128(canonical).digest() != sealed:
            raise InvalidFieldError(f"layer {self.layer}", "is not what its owner sealed any more")
        try:
            flag, content = _CODED, self._encode(memoryview(canonical))
        except NotFiniteError:
            flag, content = _NOT_FINITE, bytes(self.content_bytes)
        return flag + content + self._digest(sealed, flag, memoryview(content))

    def read(self, frame: memoryview, sealed: bytes) -> bytes:
        """Return a layer's canonical bytes, as far as they are still there.

        Raises:
            InvalidFieldError: the frame is not what the owner sent.
            NotFiniteError: the owner could not write it so.
        """
        flag, content, digest = bytes(frame[:1]), frame[1:-DIGEST_BYTES], bytes(frame[-DIGEST_BYTES:])
        if frame.nbytes != self.frame_bytes or self._digest(sealed, flag, content) != digest:
            raise InvalidFieldError(f"layer {self.layer}", "did not arrive as its owner sent it")
        if flag == _NOT_FINITE:
            raise NotFiniteError(f"layer {self.layer} holds values that are not finite and have no scale")
        if flag != _CODED:
            raise InvalidFieldError(f"layer {self.layer}", "is written in a way that this node does not know")
        decoded = self._decode(content)
        if self.encoding is TransferEncoding.EXACT and xxhash.xxh3_128(decoded).digest() != sealed:
            raise InvalidFieldError(f"layer {self.layer}", "is not what its owner sealed")
        return decoded

    def _digest(self, sealed: bytes, flag: bytes, content: memoryview) -> bytes:
        digest = xxhash.xxh3_128(sealed)
        digest.update(self.encoding.value.encode())
        digest.update(self.layer.to_bytes(_INDEX_BYTES, "big") + flag)
        digest.update(content)
        return digest.digest()

    def _encode(self, canonical: memoryview) -> bytes:
        if self.encoding is TransferEncoding.EXACT:
            return bytes(canonical)
        content = []
        for region in self.regions:
            nbytes = _stored_bytes(region, self.valid_length)
            values = to_floats(canonical[:nbytes], region.group.dtype)
            if not np.isfinite(values).all():
                raise NotFiniteError(f"layer {self.layer}")
            values = np.ascontiguousarray(_by_head(values.reshape(_memory_shape(region, self.valid_length)), region))
            content.append(encode(values, region.role, self.encoding))
            canonical = canonical[nbytes:]
        return b"".join(content)

    def _decode(self, content: memoryview) -> bytes:
        if self.encoding is TransferEncoding.EXACT:
            return bytes(content)
        canonical = []
        for region in self.regions:
            nbytes = self._encoded_bytes(region)
            values = decode(content[:nbytes], _shape(region, self.valid_length), region.role, self.encoding)
            canonical.append(from_floats(np.ascontiguousarray(_by_head(values, region)), region.group.dtype))
            content = content[nbytes:]
        return b"".join(canonical)

    def _encoded_bytes(self, region: Region) -> int:
        return encoded_bytes(_shape(region, self.valid_length), region.role, self.encoding)


def frames_of(geometry: CacheGeometry, valid_length: int, form: TransferForm) -> tuple[LayerFrame, ...]:
    """Return how each layer of a payload is written, in order."""
    layout = slot_layout(geometry, valid_length)
    layers = groupby(layout.regions, key=lambda region: region.layer)
    return tuple(_frame(layer, tuple(regions), valid_length, form) for layer, regions in layers)


def gains(geometry: CacheGeometry, valid_length: int, form: TransferForm) -> bool:
    """Tell whether a form writes anything in fewer bytes."""
    return any(frame.encoding is not TransferEncoding.EXACT for frame in frames_of(geometry, valid_length, form))


def stream_bytes(frames: tuple[LayerFrame, ...]) -> int:
    """Return how long the stream of these frames is."""
    return sum(frame.frame_bytes for frame in frames)


def _frame(layer: int, regions: tuple[Region, ...], valid_length: int, form: TransferForm) -> LayerFrame:
    group = regions[0].group
    exact = LayerFrame(layer=layer, regions=regions, valid_length=valid_length, encoding=TransferEncoding.EXACT)
    has_scales = bool(group.k_scales or group.v_scales)
    if form.is_exact or layer < form.exact_layers_first or has_scales or group.dtype not in _DTYPES:
        return exact
    coded = LayerFrame(layer=layer, regions=regions, valid_length=valid_length, encoding=form.encoding)
    return coded if coded.content_bytes < exact.content_bytes else exact


def _shape(region: Region, valid_length: int) -> tuple[int, int, int]:
    return region.group.kv_heads, region.group.stored_tokens(valid_length), region.head_dim


def _memory_shape(region: Region, valid_length: int) -> tuple[int, int, int]:
    heads, tokens, channels = _shape(region, valid_length)
    return (heads, tokens, channels) if region.group.order is DimensionOrder.HND else (tokens, heads, channels)


def _by_head(values: Floats, region: Region) -> Floats:
    """Turn the order in memory into the one by heads, or back."""
    return values if region.group.order is DimensionOrder.HND else values.transpose(1, 0, 2)


def _stored_bytes(region: Region, valid_length: int) -> int:
    return region.strip_count * region.stored_strip_bytes(valid_length)
