"""Loading a checkpoint from a folder, and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge.integrations.transformers.errors import UnsupportedModelError


def load_local(folder: str | os.PathLike[str], *, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the model of a folder, on the host and evaluating, and its tokenizer; no hub is asked and no code run.

    Args:
        folder: A checkpoint as the library saves it.
        dtype: Element type that the weights compute in, by torch's name; the checkpoint's own if `auto`.

    Raises:
        UnsupportedModelError: there is no such folder or type, or the library cannot load what it holds.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UnsupportedModelError(str(path), "is not a folder with a config.json")
    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise UnsupportedModelError(dtype, "is not a floating-point element type")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise UnsupportedModelError(str(path), f"cannot be loaded: {error}") from error
