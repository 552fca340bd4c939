"""How values are written on their way from one node to another, and what a replica that lost bits is called.

A replica whose values were written in fewer bits is not what its handoff reference names, so it lies under another key:
the reference with a mark behind it, `kvb://node/key@1#INT8.2`. A reference ends in a generation, so nobody can ask for
that name or publish under it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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


_BY_LOSS = tuple(TransferEncoding)
"""From what loses nothing to what loses most."""
_MARKED = re.compile(r"(kvb://.*@[1-9][0-9]{0,19})#((?:INT8|INT4)\.[0-9]{1,5})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferForm:
    """How the layers of a payload are written."""

    encoding: TransferEncoding = TransferEncoding.EXACT
    """How many bits each value takes."""
    exact_layers_first: int = 0
    """Layers below this index keep all bits whatever the encoding; 0 if it keeps all anyhow."""

    @property
    def is_exact(self) -> bool:
        """Tell whether all bits are kept."""
        return self.encoding is TransferEncoding.EXACT

    def serves(self, wanted: TransferForm) -> bool:
        """Tell whether what was written so has lost no more than what is written as `wanted`."""
        if self.is_exact:
            return True
        keeps_bits = _BY_LOSS.index(self.encoding) <= _BY_LOSS.index(wanted.encoding)
        return keeps_bits and self.exact_layers_first >= wanted.exact_layers_first

    def __str__(self) -> str:
        """Return how it is told to people."""
        if not self.exact_layers_first:
            return self.encoding.value
        return f"{self.encoding.value} but for the first {self.exact_layers_first} layers"


EXACT_FORM = TransferForm()
"""All bits of all layers."""


def form_of(encoding: TransferEncoding, exact_layers_first: int) -> TransferForm:
    """Return the one way in which a form is written."""
    if encoding is TransferEncoding.EXACT:
        return EXACT_FORM
    return TransferForm(encoding=encoding, exact_layers_first=exact_layers_first)


def marked_key(key: str, form: TransferForm) -> str:
    """Return the key of a replica of what the handoff reference `key` names."""
    return key if form.is_exact else f"{key}#{form.encoding.value}.{form.exact_layers_first}"


def unmarked_key(key: str) -> str:
    """Return the handoff reference behind the key of a replica, and any other key as it is."""
    found = _MARKED.fullmatch(key)
    return key if found is None else found[1]
