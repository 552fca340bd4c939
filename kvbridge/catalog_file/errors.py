"""The one error of reading a catalog file."""

from __future__ import annotations

from kvbridge.yaml_file import YamlFileError


class CatalogFileError(YamlFileError):
    """A catalog file is not read: nothing of it is believed."""
