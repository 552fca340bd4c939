"""Contexts of Python's `ssl` for what is not gRPC; making one is the check that its files belong together."""

from __future__ import annotations

import os
import ssl
from typing import Any

from kvbridge.tls.files import TlsFileError, TlsFiles, TlsMaterial

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""What TLS 1.2 may use: forward secrecy and authenticated encryption. TLS 1.3 has nothing else."""


class _Secured(ssl.SSLObject):
    """What asyncio asks for the certificate as soon as there is one, whatever stands in it."""

    def getpeercert(self, binary_form: bool = False) -> Any:  # noqa: FBT001, FBT002 - as it is declared
        """Return the certificate; nothing of it if one of its names is no text. `kvbridge.tls.subjects` reads names."""
        try:
            return super().getpeercert(binary_form)
        except ValueError:
            return {}


def server_context(material: TlsMaterial, files: TlsFiles, *, require_client: bool = False) -> ssl.SSLContext:
    """Return what secures connections that come in; with authorities, clients may show a certificate, or have to.

    Raises:
        TlsFileError: certificate, key and authorities cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, material, files)
    # Nobody comes often enough for a session to be worth keeping, and a kept one would outlive its authority.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    if material.ca:
        _trust(context, material, files)
        context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
    return context


def client_context(material: TlsMaterial, files: TlsFiles) -> ssl.SSLContext:
    """Return what secures connections that go out; the other side must show a certificate with the name asked for.

    Raises:
        TlsFileError: certificate, key and authorities cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, material, files)
    if material.ca:
        _trust(context, material, files)
    else:
        context.load_default_certs()
    return context


def _context(protocol: int, material: TlsMaterial, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslobject_class = _Secured
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    if material.certificate:
        _show(context, material, files)
    return context


def _show(context: ssl.SSLContext, material: TlsMaterial, files: TlsFiles) -> None:
    """Load certificate and key from the very bytes that were read: by path they might be others by now."""
    descriptor = os.memfd_create("kvbridge-certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(material.key.rstrip() + b"\n" + material.certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=lambda: b"")
    except (OSError, ValueError) as error:  # What OpenSSL says names no content.
        problem = getattr(error, "reason", None) or getattr(error, "strerror", None) or "they cannot be read"
        raise TlsFileError(f"{files.certificate} and {files.key} cannot be used together: {problem}") from error
    finally:
        os.close(descriptor)


def _trust(context: ssl.SSLContext, material: TlsMaterial, files: TlsFiles) -> None:
    # Between certificates many bundles name them, in any writing. OpenSSL passes over that, and Python's binding takes
    # nothing but ASCII; inside a certificate a question mark is as wrong as what it stands for.
    pem = material.ca.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")
    try:
        context.load_verify_locations(cadata=pem)
    except (OSError, ValueError) as error:
        problem = getattr(error, "reason", None) or "it cannot be read"
        raise TlsFileError(f"{files.ca}: {problem}") from error
