"""What the SDK raises: errors of use alone, never because a cache cannot be had.

Each is a `BridgeError` and a built-in error, so that a caller may catch either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvbridge.core.errors import BridgeError, InvalidFieldError


class ArgumentValueError(InvalidFieldError, ValueError):
    """An argument has the right type and a value that cannot be."""


class ArgumentTypeError(InvalidFieldError, TypeError):
    """An argument is of the wrong type."""


class ShapeMismatchError(ArgumentValueError):
    """A tensor does not have the shape that geometry and valid length demand; nothing was written."""


class DtypeMismatchError(ArgumentTypeError):
    """A tensor does not have the geometry's dtype; nothing is ever cast silently, and nothing was written."""


class UnknownLayerError(ArgumentValueError):
    """The geometry has no such layer."""


class LayersMissingError(ArgumentValueError):
    """A publication was to be committed before every layer was written; it was aborted."""

    def __init__(self, layers: Iterable[int]) -> None:
        """Name the `layers` that are missing."""
        self.layers = tuple(layers)
        names = ", ".join(map(str, self.layers))
        super().__init__("layers", f"nothing or only a part was written for {names}; the publication was aborted")


class PublicationClosedError(BridgeError, RuntimeError):
    """A publication was used after its commit or abort."""


class NoCacheError(BridgeError, RuntimeError):
    """Tensors were asked of a handoff that has none; look at `handoff.kv` first."""


class ScaledValuesError(BridgeError, RuntimeError):
    """The cache holds scaled values, and this call would read them as if they were not: take the text."""


class AlignerNotAppliedError(BridgeError, RuntimeError):
    """The cache is another model's until its aligner is applied, and this call would use it as it is."""


class LayoutUnknownError(BridgeError, RuntimeError):
    """A mask was asked of a plan of which it is not known how its parts lie."""


class HandoffInvalidError(BridgeError, RuntimeError):
    """The lease was lost before a copy was complete: discard what was copied and take the text."""


class BridgeClosedError(BridgeError, RuntimeError):
    """The bridge object was closed."""


class BridgeForkedError(BridgeError, RuntimeError):
    """The bridge object belongs to the parent process; a forked child must connect anew."""


class BridgeUnreachableError(BridgeError, RuntimeError):
    """An inspecting call got no answer; publish and acquire never raise this."""


class ChangeRefusedError(BridgeError, RuntimeError):
    """The bridge answered that it does not do this: a file rules its catalog, or what was named is not there."""


@contextmanager
def arguments_checked() -> Iterator[None]:
    """Raise what the core refuses as an error that is a `ValueError` too."""
    try:
        yield
    except (ArgumentValueError, ArgumentTypeError):
        raise
    except InvalidFieldError as error:
        raise ArgumentValueError(error.field, error.problem) from error
