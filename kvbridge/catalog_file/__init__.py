"""The catalog as a YAML file. Every refusal names line and field, and a file is believed whole or not at all."""

from kvbridge.catalog_file.errors import CatalogFileError
from kvbridge.catalog_file.reader import load_catalog_file, read_bytes, read_catalog
from kvbridge.yaml_file import FILE_BYTES_MAX, FileProblem

__all__ = [
    "FILE_BYTES_MAX",
    "CatalogFileError",
    "FileProblem",
    "load_catalog_file",
    "read_bytes",
    "read_catalog",
]
