"""How values are written on their way from one node to another."""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class TransferEncoding(StrEnum):
    """How many bits each value takes on its way."""

    EXACT = "EXACT"
    """All of them: what arrives is what was sent."""
    INT8 = "INT8"
    """Eight, and a scale for each channel of K and each token of V."""
    INT4 = "INT4"
    """Four, and a scale for each group of 32 values."""
