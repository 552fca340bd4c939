"""Certificates, keys and tokens in files that change while a process runs, and what secures connections by them."""

from kvbridge.tls.certificate import KEY_KINDS, CertificateError, key_kind_of, validity_of
from kvbridge.tls.contexts import client_context, server_context
from kvbridge.tls.files import TlsFileError, TlsFiles, TlsMaterial, is_open_to_others, read_material
from kvbridge.tls.keeper import TlsKeeper, TlsStanding
from kvbridge.tls.subjects import names_in, names_in_pem, subjects_of
from kvbridge.tls.token_file import TOKEN_CHARACTERS_MIN, TokenFile, TokenFileError

__all__ = [
    "KEY_KINDS",
    "TOKEN_CHARACTERS_MIN",
    "CertificateError",
    "TlsFileError",
    "TlsFiles",
    "TlsKeeper",
    "TlsMaterial",
    "TlsStanding",
    "TokenFile",
    "TokenFileError",
    "client_context",
    "is_open_to_others",
    "key_kind_of",
    "names_in",
    "names_in_pem",
    "read_material",
    "server_context",
    "subjects_of",
    "validity_of",
]
