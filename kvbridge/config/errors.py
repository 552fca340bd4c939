"""What is wrong with a configuration."""

from __future__ import annotations

from kvbridge.core.errors import BridgeError


class ConfigurationError(BridgeError):
    """A setting is unknown, of the wrong type or out of its range."""
