"""The projection of keys and values of layer 0, and how far they are from a row of the table.

1. Each element is divided by its root mean square over the vocabulary (of its pair, where pairs rotate). Rounding is in
   proportion to an element's size, so that all elements are as noisy after that; and those with a large bias, which
   every token shares, do not drown the others.
2. Each head is projected on a few random orthonormal directions and scaled so that a projected number has the mean
   square 1. Heads stay apart, so that a shard of them can be compared.
3. The error of a token is the root mean square difference from its row, in proportion to the row's own where that is
   more than 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.geometry import RopePairing
from kvbridge.probe.fingerprint import DIMS_MAX
from kvbridge.probe.rotation import pair_slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW_NUMBERS = 32
"""About how many numbers a row of the table has, whatever the number of heads."""
CHANCE_PAIRS = 4096
"""How many pairs of tokens are compared to learn what a wrong token looks like."""
PRODUCTS_MAX = 1 << 17
"""Most multiplications of one matrix product."""
_WEIGHT_RATIO_MAX = 100.0
"""An element that is this much smaller than the mean one is not weighed up any more: it may be nothing but noise."""


def project(values: NDArray[np.float32], projection: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `[tokens, heads, dims]` for `[tokens, heads, head dimension]`."""
    _, head_dim, dims = projection.shape
    projected = np.empty((*values.shape[:2], dims), np.float32)
    # Larger products would be shared out to threads, which costs more than it saves where processors are busy.
    step = max(PRODUCTS_MAX // (head_dim * dims), 1)
    for start in range(0, len(values), step):
        part = values[start : start + step].transpose(1, 0, 2)
        projected[start : start + step] = np.matmul(part, projection).transpose(1, 0, 2)
    return projected


def row_errors(projected: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.floating]:
    """Return the error of each token against its row, both `[tokens, heads, dims]`."""
    size = np.maximum(_root_mean_square(rows), 1)
    errors: NDArray[np.floating] = _root_mean_square(projected - rows) / size
    return errors


def dims_per_head(heads: int, head_dim: int) -> int:
    """Return how many numbers each head is projected to."""
    return max(1, min(ROW_NUMBERS // heads, DIMS_MAX, head_dim))


def make_projection(
    sample: NDArray[np.float32], *, pairs: int, pairing: RopePairing, dice: np.random.Generator
) -> NDArray[np.float32]:
    """Return a projection for what the sample of tokens, `[tokens, heads, head dimension]`, is typical of.

    Args:
        sample: Un-rotated keys, or values.
        pairs: How many pairs of elements rotate; 0 for values.
        pairing: Which elements are a pair.
        dice: Where the directions come from.
    """
    _, heads, head_dim = sample.shape
    mean_squares = np.square(sample.astype(np.float64)).mean(0)
    firsts, seconds = pair_slices(pairs, pairing)
    of_pairs = (mean_squares[:, firsts] + mean_squares[:, seconds]) / 2
    mean_squares[:, firsts] = mean_squares[:, seconds] = of_pairs
    sizes = np.sqrt(mean_squares)
    sizes = np.maximum(sizes, max(float(sizes.mean()) / _WEIGHT_RATIO_MAX, float(np.finfo(np.float32).tiny)))
    dims = dims_per_head(heads, head_dim)
    directions = np.stack([np.linalg.qr(dice.standard_normal((head_dim, dims)))[0] for _ in range(heads)])
    projection: NDArray[np.float32] = (directions / sizes[:, :, None]).astype(np.float32)
    return projection


def chance_error(table: NDArray[np.float16], dice: np.random.Generator) -> float:
    """Return the median error of tokens against the rows of others."""
    one, other = dice.integers(0, len(table), (2, CHANCE_PAIRS))
    return float(np.median(row_errors(table[one].astype(np.float32), table[other].astype(np.float32))))


def _root_mean_square(rows: NDArray[np.float32]) -> NDArray[np.floating]:
    sizes: NDArray[np.floating] = np.sqrt(np.square(rows).mean((1, 2)))
    return sizes
