"""Projections and errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.geometry import RopePairing
from kvbridge.probe.rotation import pair_slices
from kvbridge.probe.tables import chance_error, dims_per_head, make_projection, project, row_errors

TOKENS, HEADS, DIM = 500, 3, 16
SIZES = np.geomspace(1e-3, 1e3, DIM)
SAMPLE = (np.random.default_rng(2).standard_normal((TOKENS, HEADS, DIM)) * SIZES).astype(np.float32)


@pytest.mark.parametrize("pairs", [0, 4, 8])
@pytest.mark.parametrize("pairing", list(RopePairing))
def test_projected_numbers_have_one_size(pairs: int, pairing: RopePairing) -> None:
    """However different elements are, a projected number has about the mean square 1: all models share limits."""
    projection = make_projection(SAMPLE, pairs=pairs, pairing=pairing, dice=np.random.default_rng(3))
    projected = project(SAMPLE, projection)
    assert projected.shape == (TOKENS, HEADS, dims_per_head(HEADS, DIM))
    mean_squares = np.square(projected).mean((0, 2))
    # The smallest elements are not weighed up, and count for less.
    assert ((mean_squares > 0.3) & (mean_squares < 2)).all()


@pytest.mark.parametrize("pairing", list(RopePairing))
def test_elements_of_a_pair_weigh_the_same(pairing: RopePairing) -> None:
    """Otherwise the rounding of the larger one would be magnified when a rotation is undone."""
    sample = np.random.default_rng(4).standard_normal((TOKENS, 1, 8)).astype(np.float32)
    firsts, seconds = pair_slices(4, pairing)
    sample[..., firsts] *= 30
    # The same dice give the same directions, so that the two differ by what elements are divided by.
    turning = make_projection(sample, pairs=4, pairing=pairing, dice=np.random.default_rng(5))
    still = make_projection(sample, pairs=0, pairing=pairing, dice=np.random.default_rng(5))
    sizes = np.sqrt(np.square(sample).mean(0))[0] * (still / turning)[0, :, 0]
    np.testing.assert_allclose(sizes[firsts], sizes[seconds], rtol=1e-4)
    assert (sizes[seconds] > 15).all()


def test_the_error_of_a_stranger_is_near_the_chance() -> None:
    """A row's own token has none, and another one has what the table says of strangers."""
    dice = np.random.default_rng(6)
    projected = project(SAMPLE, make_projection(SAMPLE, pairs=0, pairing=RopePairing.HALF_SPLIT, dice=dice))
    table = projected.astype(np.float16)
    rows = table.astype(np.float32)
    assert row_errors(projected, rows).max() < 1e-3
    strangers = float(np.median(row_errors(np.roll(projected, 1, axis=0), rows)))
    assert strangers == pytest.approx(chance_error(table, dice), rel=0.2)


def test_large_rows_are_compared_in_proportion() -> None:
    """Rounding is in proportion to a token's size, and so is its error."""
    rows = np.full((1, 1, 4), 100.0, np.float32)
    assert row_errors(rows * np.float32(1.01), rows)[0] == pytest.approx(0.01, rel=1e-3)


@given(st.integers(1, 4096), st.integers(1, 16_384))
def test_rows_stay_short(heads: int, head_dim: int) -> None:
    """A row has about 32 numbers, and one for each head of a model with more heads."""
    dims = dims_per_head(heads, head_dim)
    assert 1 <= dims <= min(16, head_dim)
    assert heads * dims <= max(heads, 32)
