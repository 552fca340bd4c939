"""The model of the transformers library inside what a caller holds."""

from __future__ import annotations

from typing import Any

from kvbridge.integrations.transformers.errors import UnsupportedModelError

WRAPPERS_MAX = 8
"""Most wrappers around one model."""
_LIBRARY = "transformers.models."
"""Where the library's own model and configuration classes live."""


def unwrap(model: Any) -> Any:
    """Return the transformers model inside `torch.compile` and PEFT wrappers, with adapter layers still in place.

    Raises:
        UnsupportedModelError: there is no model inside, or its class is not the library's own, so that neither its
            attention nor its position encoding is known.
    """
    inner = model
    for _ in range(WRAPPERS_MAX):
        wrapped = _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
    require_library_class(inner)
    return inner


def require_library_class(owner: Any) -> None:
    """Refuse a model or configuration whose class is not the library's own.

    Raises:
        UnsupportedModelError: naming the class and its module.
    """
    module = type(owner).__module__
    if not module.startswith(_LIBRARY):
        raise UnsupportedModelError(
            type(owner).__name__,
            f"is defined in {module}, not in {_LIBRARY}*; what its code does with keys and values is not known",
        )


def _wrapped(model: Any) -> Any | None:
    compiled = getattr(model, "_orig_mod", None)
    if compiled is not None:
        return compiled
    if type(model).__module__.startswith("peft."):
        return model.get_base_model()
    return None
