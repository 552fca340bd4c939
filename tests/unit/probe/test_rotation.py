"""Turning keys back, and the angles of every kind of scaling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.geometry import PositionEncoding, PositionKind, RopePairing, RopeParameters
from kvbridge.probe.rotation import inverse_frequencies, rotation
from tests import builders
from tests.unit.probe.synthetic import rotate


def rope(**changes: object) -> RopeParameters:
    """Return plain parameters with some changed."""
    return RopeParameters(**{"theta": 10_000.0, **changes})  # type: ignore[arg-type] # the tests know the fields


@given(
    pairing=st.sampled_from(RopePairing),
    partial_factor=st.sampled_from([0.25, 0.5, 1.0]),
    theta=st.floats(10.0, 1e7),
    first=st.integers(0, 10_000),
)
def test_what_was_rotated_is_turned_back(pairing: RopePairing, partial_factor: float, theta: float, first: int) -> None:
    """Undoing a rotation that complex numbers made gives the keys from before."""
    parameters = rope(theta=theta, partial_factor=partial_factor, pairing=pairing)
    keys, positions = np.random.default_rng(1).standard_normal((5, 2, 16)), np.arange(first, first + 5)
    turned = rotation(PositionEncoding(kind=PositionKind.ROPE, rope=parameters), 16)
    assert turned is not None
    plain = turned.undo(rotate(keys, positions, parameters).astype(np.float32), positions)
    # Angles are float32, as in models.
    np.testing.assert_allclose(plain, keys, atol=1e-5 + first * 2.0**-21)


def test_the_attention_factor_is_taken_out() -> None:
    """Only what rotates was multiplied by it."""
    parameters = rope(partial_factor=0.5, scaling=(("attention_factor", (2.0,)),))
    turned = rotation(PositionEncoding(kind=PositionKind.ROPE, rope=parameters), 8)
    assert turned is not None
    plain = turned.undo(np.ones((1, 1, 8), np.float32), np.zeros(1, np.int64))
    assert plain.tolist() == [[[0.5] * 4 + [1.0] * 4]]


LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192.0}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096.0,
    "truncate": 1.0,
}


def scaled(rope_type: str, numbers: dict[str, float]) -> RopeParameters:
    """Return parameters of a scaling scheme."""
    scaling = tuple((name, (value,)) for name, value in sorted(numbers.items()))
    return rope(rope_type=rope_type, scaling=scaling, theta=500_000.0)


@pytest.mark.parametrize(
    "parameters",
    [
        rope(),
        rope(partial_factor=0.25),
        scaled("linear", {"factor": 4.0}),
        scaled("llama3", LLAMA3),
        scaled("yarn", YARN),
        scaled("yarn", {**YARN, "truncate": 0.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_angles_are_those_of_the_integration(parameters: RopeParameters, head_dim: int) -> None:
    """The two ways to compute frequencies, one of which is checked against models, agree."""
    from kvbridge.integrations.transformers import rope as reference  # noqa: PLC0415 - loads the library

    frequencies = inverse_frequencies(parameters, head_dim)
    assert frequencies is not None
    np.testing.assert_allclose(frequencies, reference.inverse_frequencies(parameters, head_dim).numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        rope(rope_type="longrope"),
        rope(rope_type="dynamic"),
        rope(rope_type="linear"),
        scaled("linear", {"factor": 0.0}),
        scaled("llama3", {**LLAMA3, "factor": 0.0}),
        scaled("yarn", {name: value for name, value in YARN.items() if name != "factor"}),
        scaled("yarn", {**YARN, "beta_slow": 0.0}),
        scaled("yarn", {**YARN, "original_max_position_embeddings": -1.0}),
        rope(rope_type="linear", scaling=(("factor", (1.0, 2.0)),)),
        rope(theta=1.0, rope_type="yarn", scaling=tuple((name, (value,)) for name, value in YARN.items())),
        rope(partial_factor=0.2),
        scaled("yarn", YARN),
        rope(scaling=(("attention_factor", (0.0,)),)),
        rope(scaling=(("attention_factor", ()),)),
    ],
)
def test_what_is_not_determined_is_none(parameters: RopeParameters) -> None:
    """Unknown, incomplete and impossible parameters give no rotation rather than a wrong one."""
    assert rotation(PositionEncoding(kind=PositionKind.ROPE, rope=parameters), 16) is None


@given(builders.position_encodings, st.integers(1, 70))
def test_no_declaration_breaks_it(encoding: PositionEncoding, head_dim: int) -> None:
    """Whatever a producer declares either rotates all keys finitely or not at all."""
    turned = rotation(encoding, head_dim)
    if turned is not None:
        assert np.isfinite(turned.undo(np.ones((2, 1, head_dim), np.float32), np.arange(2))).all()
