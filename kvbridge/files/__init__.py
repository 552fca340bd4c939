"""Files that people write and that are read again and again while a process runs."""

from kvbridge.files.poller import Poller
from kvbridge.files.reading import UnreadableFileError, read_bytes
from kvbridge.files.signatures import Signature, is_settled, signature_of

__all__ = ["Poller", "Signature", "UnreadableFileError", "is_settled", "read_bytes", "signature_of"]
