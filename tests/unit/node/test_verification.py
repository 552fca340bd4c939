"""Checks of bytes against a plain reference."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadDescriptor, Verification, seal
from kvbridge.core.geometry import CacheGeometry, Dtype
from kvbridge.core.layout import HEADER_BYTES, slot_layout
from kvbridge.core.reasons import Reason
from kvbridge.node.verification import Verifier, all_finite
from tests import builders


def describe(
    geometry: CacheGeometry, capacity: int, valid_length: int, digests: tuple[bytes, ...] = ()
) -> PayloadDescriptor:
    """Return the descriptor of a payload with these lengths."""
    spec = builders.spec(geometry=geometry, capacity_tokens=capacity, tokens=builders.tokens(valid_length))
    return seal(
        spec, generation=1, valid_length=None, tokens=None, layer_digests=digests, verification=Verification.FULL
    )


def reference_digests(slot: bytes, descriptor: PayloadDescriptor) -> tuple[bytes, ...]:
    """Return each layer's digest, computed in the plainest way."""
    layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
    digests = []
    for layer in descriptor.geometry.layers:
        regions = [region for region in layout.regions if region.layer == layer]
        pieces = [piece for region in regions for piece in region.stored(descriptor.valid_length)]
        content = b"".join(slot[piece.offset_bytes : piece.offset_bytes + piece.length_bytes] for piece in pieces)
        digests.append(xxhash.xxh3_128_digest(content))
    return tuple(digests)


@settings(deadline=None)
@given(builders.geometries(), st.integers(1, 60), st.integers(1, 4), st.randoms(use_true_random=False), st.data())
async def test_digests_and_zeroes_are_right_for_every_geometry(
    geometry: CacheGeometry, capacity: int, threads: int, dice: object, data: st.DataObject
) -> None:
    """Digests equal the reference, the padding is zeroed, and neither header nor stored bytes change."""
    del dice
    valid_length = data.draw(st.integers(1, capacity))
    descriptor = describe(geometry, capacity, valid_length)
    layout = slot_layout(geometry, capacity)
    slot = bytearray(np.random.default_rng(valid_length).integers(1, 50, layout.slot_bytes, np.uint8).tobytes())
    before = bytes(slot)
    verifier = Verifier(threads)
    finding = await verifier.check(memoryview(slot), descriptor, level=Verification.DIGEST, zero_padding=True)
    verifier.close()
    assert finding.failure is None
    assert finding.layer_digests == reference_digests(before, descriptor)
    kept = [(0, HEADER_BYTES), *((p.offset_bytes, p.length_bytes) for p in layout.canonical(valid_length))]
    expected = bytearray(len(slot))
    for offset, length in kept:
        expected[offset : offset + length] = before[offset : offset + length]
    assert slot == expected


@pytest.mark.parametrize("layer", [0, 1])
async def test_a_flipped_bit_is_found_in_its_layer(layer: int) -> None:
    """One changed bit anywhere in a layer makes that layer's digest differ, and the finding names it."""
    geometry = builders.geometry()
    layout = slot_layout(geometry, 10)
    slot = bytearray(layout.slot_bytes)
    digests = reference_digests(bytes(slot), describe(geometry, 10, 10))
    region = next(region for region in layout.regions if region.layer == layer)
    slot[region.offset_bytes + 5] ^= 1
    verifier = Verifier(2)
    finding = await verifier.check(
        memoryview(slot), describe(geometry, 10, 10, digests), level=Verification.DIGEST, zero_padding=False
    )
    verifier.close()
    assert finding.failure == (Reason.PAYLOAD_CORRUPT, f"digests differ from the declared ones in layer {layer}")


async def test_without_verification_nothing_is_digested() -> None:
    """The lowest level only zeroes the padding."""
    slot = memoryview(bytearray(slot_layout(builders.geometry(), 10).slot_bytes))
    verifier = Verifier(1)
    finding = await verifier.check(
        slot, describe(builders.geometry(), 10, 4), level=Verification.NONE, zero_padding=True
    )
    verifier.close()
    assert (finding.layer_digests, finding.failure) == ((), None)


@pytest.mark.parametrize("dtype", list(Dtype))
@given(position=st.integers(0, 999), bad=st.sampled_from([float("nan"), float("inf"), float("-inf"), None]))
def test_one_bad_value_among_many_is_found(dtype: Dtype, position: int, bad: float | None) -> None:
    """NaN and infinities are found wherever they stand, and finite values pass however large they are."""
    kind = getattr(torch, dtype.value)
    values = torch.full((1000,), torch.finfo(kind).max, dtype=kind)
    if bad is not None:
        values[position] = bad
    assert all_finite(values.view(torch.uint8).numpy(), dtype) is (bad is None)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_every_pattern_of_two_bytes_is_judged_as_torch_judges_it(dtype: Dtype) -> None:
    """All 65,536 of them, one by one."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = torch.from_numpy(patterns).view(getattr(torch, dtype.value)).isfinite().tolist()
    assert [all_finite(patterns[number : number + 1].view(np.uint8), dtype) for number in range(1 << 16)] == finite


def test_a_node_starts_without_torch() -> None:
    """Loading it would take most of the time and of the memory that a start takes."""
    look = "import sys, kvbridge.server.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


@pytest.mark.parametrize("problem", [RuntimeError("can't start new thread"), MemoryError()])
async def test_a_check_that_breaks_off_fails_the_payload(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that could not be checked count as corrupt, so that no payload stays half checked for ever."""

    def breaks(*_: object) -> None:
        raise problem

    verifier = Verifier(2)
    if isinstance(problem, RuntimeError):
        monkeypatch.setattr(verifier._executor, "submit", breaks)
    else:
        monkeypatch.setattr("kvbridge.node.verification.all_finite", breaks)
    slot = memoryview(bytearray(slot_layout(builders.geometry(), 10).slot_bytes))
    finding = await verifier.check(
        slot, describe(builders.geometry(), 10, 4), level=Verification.FULL, zero_padding=True
    )
    verifier.close()
    assert finding.failure is not None
    assert finding.failure[0] is Reason.PAYLOAD_CORRUPT
