"""Probes: telling from a sample of its bytes whether a cache can be what it is declared to be."""

from kvbridge.probe.check import check_tokens
from kvbridge.probe.errors import FingerprintBuildError, FingerprintFileError, FingerprintMismatchError
from kvbridge.probe.files import load_fingerprint, save_fingerprint
from kvbridge.probe.finding import ProbeFinding
from kvbridge.probe.fingerprint import Fingerprint, RoleFingerprint
from kvbridge.probe.limits import SAMPLE_TOKENS

__all__ = [
    "SAMPLE_TOKENS",
    "Fingerprint",
    "FingerprintBuildError",
    "FingerprintFileError",
    "FingerprintMismatchError",
    "ProbeFinding",
    "RoleFingerprint",
    "check_tokens",
    "load_fingerprint",
    "save_fingerprint",
]
