"""Who may call a node, as a YAML file. Every refusal names line and field, and none repeats a secret."""

from kvbridge.access_file.errors import AccessFileError
from kvbridge.access_file.reader import LoadedAccess, load_access_file

__all__ = ["AccessFileError", "LoadedAccess", "load_access_file"]
