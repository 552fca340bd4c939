"""Where the other nodes are and what they own: soft state that is believed by nobody."""

from kvbridge.directory.opening import open_directory
from kvbridge.directory.port import (
    Beat,
    Directory,
    DirectoryUnavailableError,
    Entry,
    Location,
    Member,
)

__all__ = [
    "Beat",
    "Directory",
    "DirectoryUnavailableError",
    "Entry",
    "Location",
    "Member",
    "open_directory",
]
