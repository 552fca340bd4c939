"""The node's configuration: one frozen dataclass, filled from a TOML file, then `KVBRIDGE_*` variables, then flags."""

from kvbridge.config.addresses import (
    ENVIRONMENT_PREFIX,
    PORT_MAX,
    default_socket_path,
    descriptor_socket_path,
    is_loopback,
)
from kvbridge.config.errors import ConfigurationError
from kvbridge.config.loading import load_config, setting_meanings
from kvbridge.config.settings import BridgeConfig
from kvbridge.config.variables import unknown_variables

__all__ = [
    "ENVIRONMENT_PREFIX",
    "PORT_MAX",
    "BridgeConfig",
    "ConfigurationError",
    "default_socket_path",
    "descriptor_socket_path",
    "is_loopback",
    "load_config",
    "setting_meanings",
    "unknown_variables",
]
