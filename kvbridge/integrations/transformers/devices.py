"""On which devices the layers of a loaded model compute."""

from __future__ import annotations

from typing import Any

import torch

from kvbridge.integrations.transformers.errors import UnsupportedModelError


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Return the device of each decoder layer of an unwrapped model.

    Raises:
        UnsupportedModelError: the model lies on several devices, and which layer is where cannot be told.
    """
    count = int(model.config.num_hidden_layers)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1:
        return dict.fromkeys(range(count), devices.pop())
    layers = getattr(model.get_decoder(), "layers", ())
    if len(layers) != count:
        raise UnsupportedModelError(type(model).__name__, "lies on several devices, and has no list of its layers")
    return {index: next(layer.parameters()).device for index, layer in enumerate(layers)}
