"""Settings in YAML files: the schema is that of a protobuf message, and every refusal names line and field."""

from kvbridge.yaml_file.errors import FileProblem, YamlFileError
from kvbridge.yaml_file.files import read_file
from kvbridge.yaml_file.nodes import (
    FILE_BYTES_MAX,
    Fields,
    Items,
    Node,
    Piece,
    Scalar,
    UnreadableError,
    document,
    pieces,
)
from kvbridge.yaml_file.schema import Filler

__all__ = [
    "FILE_BYTES_MAX",
    "Fields",
    "FileProblem",
    "Filler",
    "Items",
    "Node",
    "Piece",
    "Scalar",
    "UnreadableError",
    "YamlFileError",
    "document",
    "pieces",
    "read_file",
]
