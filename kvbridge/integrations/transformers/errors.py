"""What this integration refuses, each error with the name of what it refused."""

from __future__ import annotations

from kvbridge.core.errors import BridgeError


class UnsupportedCacheError(BridgeError):
    """A cache, layer or position encoding cannot be handed over exactly, so it is not handed over at all."""

    def __init__(self, name: str, problem: str) -> None:
        """Name the class, layer type or setting that is refused and say why."""
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class UnsupportedModelError(BridgeError):
    """A model, adapter or tokenizer whose identity cannot be computed from what it is."""

    def __init__(self, name: str, problem: str) -> None:
        """Name the parameter, class or setting that is refused and say why."""
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class CacheMismatchError(BridgeError):
    """A cache disagrees with the geometry, the tokens or the model that it is said to belong to."""

    def __init__(self, field: str, *, expected: object, found: object, hint: str = "") -> None:
        """Name the `field` in which `found` differs from `expected`."""
        super().__init__(f"{field}: expected {expected}, found {found}" + (f" ({hint})" if hint else ""))
        self.field = field
        self.expected = expected
        self.found = found
