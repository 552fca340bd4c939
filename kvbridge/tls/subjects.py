"""Who a verified certificate says that its owner is: the DNS names and URIs among its alternative names.

They are read here, from the certificate itself, for every port alike. gRPC hands a name on as far as its first NUL, so
that `engine.example`, a NUL and anything would be `engine.example`; OpenSSL's binding raises what it cannot decode.

    SubjectAltName ::= SEQUENCE OF GeneralName, each [2] IA5String for a DNS name, [6] IA5String for a URI, or another
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from kvbridge.tls.certificate import CertificateError, extension_of, sequence

_ALTERNATIVE_NAMES: Final = "551d11"
_KINDS: Final = frozenset({0x82, 0x86})
"""Only these: an authority may check others, such as addresses of mail, less closely."""
_VISIBLE: Final = frozenset(range(0x21, 0x7F))
"""What names of these kinds consist of; whatever else there is makes it none."""
_REMEMBERED_MAX = 1024


def subjects_of(connection: ssl.SSLObject | ssl.SSLSocket) -> frozenset[str]:
    """Return whom the other side's certificate names; nobody without one, or if it was not verified."""
    # OpenSSL hands on a certificate only if it had to be verified, and then a handshake with a bad one has failed.
    encoded = connection.getpeercert(binary_form=True)
    verified = connection.context.verify_mode is not ssl.CERT_NONE
    return names_in(encoded) if encoded and verified else frozenset()


@lru_cache(maxsize=_REMEMBERED_MAX)
def names_in_pem(pem: bytes) -> frozenset[str]:
    """Return whom a certificate in PEM names; nobody if it cannot be read."""
    try:
        return names_in(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))
    except ValueError:
        return frozenset()


def names_in(encoded: bytes) -> frozenset[str]:
    """Return whom a certificate in DER names; nobody if it cannot be read."""
    try:
        return frozenset(_names(extension_of(encoded, _ALTERNATIVE_NAMES)))
    except CertificateError:
        return frozenset()


def _names(extension: bytes) -> Iterator[str]:
    for tag, name in sequence(extension):
        if tag in _KINDS and name and _VISIBLE.issuperset(name):
            yield name.decode("ascii")
