"""A certificate authority, an access file and tokens for bridges that take nobody without proof."""

from __future__ import annotations

import socket
import ssl
from datetime import timedelta
from pathlib import Path

from kvbridge import Tls
from tests.certificates import LOCAL, Authority, Secret

ENGINE_A, ENGINE_B, NOBODY = "spiffe://cluster/a", "spiffe://cluster/b", "spiffe://cluster/nobody"
NODE = "puller.bridges.example"
"""The node that pulls, by its certificate."""
TOKEN_A, TOKEN_METRICS, TOKEN_PEER = (f"{name}-token-{name * 8}" for name in ("engine", "metrics", "peering"))
ACCESS = f"""\
tenants:
  - name: default
  - name: team-a
  - name: team-b
principals:
  - name: engine-a
    tenant: team-a
    roles: [producer, consumer]
    subjects: ["{ENGINE_A}"]
    token_files: [engine]
  - name: engine-b
    tenant: team-b
    roles: [producer, consumer]
    subjects: ["{ENGINE_B}"]
  - name: scraper
    tenant: default
    roles: [metrics]
    subjects: ["spiffe://cluster/scraper"]
    token_files: [metrics]
  - name: puller
    tenant: default
    roles: [peer]
    subjects: ["{NODE}"]
    token_files: [peering]
"""


class Kit:
    """Everything in one folder."""

    def __init__(self, directory: Path) -> None:
        """Issue the bridge's certificate and write the access file."""
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.authority, self.stranger = Authority("the authority"), Authority("a stranger")
        self.server = Secret(directory / "server", self.authority.issue(*LOCAL), self.authority.certificate)
        for name, token in (("engine", TOKEN_A), ("metrics", TOKEN_METRICS), ("peering", TOKEN_PEER)):
            (directory / name).write_text(token + "\n")
        self.access = directory / "access.yaml"
        self.access.write_text(ACCESS)
        self._secrets = 0

    def secret(
        self,
        *names: str,
        issuer: Authority | None = None,
        trusts: Authority | None = None,
        lasts: timedelta = timedelta(days=1),
    ) -> Secret:
        """Mount a new secret: a certificate for `names`, and the authorities that its owner trusts."""
        self._secrets += 1
        issued = (issuer or self.authority).issue(*names, lasts=lasts)
        return Secret(self.directory / f"{self._secrets}", issued, (trusts or self.authority).certificate)

    def token_file(self, name: str) -> str:
        """Return where a token lies."""
        return str(self.directory / name)

    def flags(self, *, client_ca: bool = True) -> tuple[str, ...]:
        """Return the flags of a bridge that takes certificates, or, without their authority, tokens alone."""
        return (*self.server.server_flags(client_ca=client_ca), "--access", str(self.access))


def tls_of(secret: Secret, *, server_name: str | None = None) -> Tls:
    """Return what a client does with a secret."""
    return Tls(ca=secret.ca, certificate=secret.certificate, key=secret.key, server_name=server_name)


def served_serial(port: int, shown: Secret) -> int:
    """Return the serial number of the certificate that a new connection to a port is shown."""
    context = ssl.create_default_context(cafile=shown.ca)
    context.load_cert_chain(shown.certificate, shown.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        certificate = secured.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)
