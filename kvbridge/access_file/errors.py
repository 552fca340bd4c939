"""The one error of reading an access file."""

from __future__ import annotations

from kvbridge.yaml_file import YamlFileError


class AccessFileError(YamlFileError):
    """An access file, or a file of tokens that it names, is not read: nothing of it is believed."""
