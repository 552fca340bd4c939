"""The node's configuration: one frozen dataclass, filled from a TOML file, then `KVBRIDGE_*` variables, then flags."""

from __future__ import annotations

import ast
import inspect
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbridge.core.descriptor import DURATION_SECONDS_MAX
from kvbridge.core.errors import BridgeError
from kvbridge.core.handoff_reference import is_node_id

ENVIRONMENT_PREFIX = "KVBRIDGE_"
SOCKET_NAME = "bridge.sock"
DESCRIPTOR_SOCKET_NAME = "descriptors.sock"
PORT_MAX = 65_535
INTEGER_MAX = (1 << 31) - 1
"""Greatest count: what gRPC takes."""
CHUNK_BYTES_MAX = 32 << 20
"""Largest chunk: clients take messages of twice that."""
JOURNAL_FILES_MAX = 1000
"""Most files of one journal: a rotation renames every one of them."""
_GIB = 1 << 30
_ARENA_BYTES_MAX = 1 << 50
_MAXIMA = {
    "arena_bytes": _ARENA_BYTES_MAX,
    "tombstone_bytes_max": _ARENA_BYTES_MAX,
    "prefetch_bytes_max": _ARENA_BYTES_MAX,
    "journal_file_bytes_max": _ARENA_BYTES_MAX,
    "journal_files_max": JOURNAL_FILES_MAX,
    "answer_bytes_remembered_max": _ARENA_BYTES_MAX,
    "text_store_bytes_max": _ARENA_BYTES_MAX,
    "chunk_bytes": CHUNK_BYTES_MAX,
    "bulk_port_told": PORT_MAX,
}
"""Settings with a greatest value of their own."""
_MAY_BE_ZERO = frozenset({"bulk_port_told", "probe_sample_tokens"})
"""Counts that mean something when they are 0."""
_POSITIVE = frozenset(
    {
        "lease_ttl_seconds",
        "reservation_ttl_seconds",
        "upload_seconds_max",
        "download_seconds_max",
        "request_seconds_max",
        "access_poll_seconds",
        "catalog_poll_seconds",
        "tls_poll_seconds",
    }
)
"""Durations that nothing could be done within if they were 0."""
_POSITIVE_SECONDS_MIN = 0.001
_WATERMARK_MIN = 0.01
"""Least share of an arena: with none at all nothing could be stored."""
_DIRECTORY_DURATIONS = (
    "directory_ttl_seconds",
    "directory_key_ttl_seconds",
    "directory_timeout_seconds",
    "heartbeat_seconds",
)
_ROOT_UID = 0
_SOCKET_MODE = re.compile(r"0?6[0-7][0-7]")
"""Modes under which the node's own user can open a socket."""
_OTHERS_MODE = 0o077
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
PEER_TLS_NAMES = ("host", "node")
"""What other nodes' certificates may have to name."""


class ConfigurationError(BridgeError):
    """A setting is unknown, of the wrong type or out of its range."""


def default_socket_path() -> str:
    """Return where node and clients on one host meet unless told otherwise.

    `KVBRIDGE_SOCKET` if set; else `/run/kvbridge/bridge.sock` for root; else the user's runtime directory.
    """
    told = os.environ.get(ENVIRONMENT_PREFIX + "SOCKET")
    if told:
        return told
    if os.getuid() == _ROOT_UID:
        return f"/run/kvbridge/{SOCKET_NAME}"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvbridge-{os.getuid()}"  # noqa: S108 - the node makes it with mode 0700
    return str(Path(runtime, "kvbridge", SOCKET_NAME))


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is this host for itself alone."""
    return address.rpartition(":")[0].strip("[]") in _LOOPBACK_HOSTS


def descriptor_socket_path(socket_path: str) -> str:
    """Return the path of the descriptor socket that belongs to the gRPC socket at `socket_path`."""
    return str(Path(socket_path).with_name(DESCRIPTOR_SOCKET_NAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """Every setting of a node; durations in seconds, sizes in bytes."""

    node_id: str = field(default_factory=socket.gethostname)
    """Name of the node in answers, logs and metrics."""
    socket: str = field(default_factory=default_socket_path)
    """Path of the gRPC unix socket; the descriptor socket lies beside it."""
    socket_mode: str = "0600"
    """Mode of both sockets, in octal; more than 0600 lets other users in, and needs `access`."""
    socket_group: str = ""
    """Group of both sockets, by name or number; empty for the node's own."""
    listen: str = "127.0.0.1:7411"
    """TCP address for clients by value; empty for none. Port 0 lets the system choose."""
    metrics_listen: str = "127.0.0.1:7412"
    """TCP address for scrapes of metrics over HTTP; empty for none. Port 0 lets the system choose."""
    insecure: bool = False
    """Allow listening beyond the loopback, and pulling from there, without encryption and without an access file."""
    access: str = ""
    """Path of the YAML file with tenants and principals; empty if whoever reaches the node may use it."""
    access_poll_seconds: float = 1.0
    """How often that file and the tokens it names are looked at for changes; SIGHUP makes them be read at once."""
    tls_certificate: str = ""
    """PEM file with the node's certificate and those between it and the root; empty for no TLS on TCP."""
    tls_key: str = ""
    """PEM file with the private key of that certificate."""
    tls_client_ca: str = ""
    """PEM file with the authorities of clients' certificates, which `listen` then requires; empty for tokens alone."""
    tls_poll_seconds: float = 1.0
    """How often certificate files are looked at for changes; SIGHUP makes them be read at once."""
    tls_expiry_warning_seconds: float = 604_800.0
    """How long before a certificate expires the log says so, but not before a fifth of its validity is left."""
    arena_bytes: int = 2 * _GIB
    """Host memory for payloads, for each tenant; a multiple of the page."""
    memory_soft_watermark: float = 0.85
    """Share of an arena above which payloads that nobody references are evicted before their memory is asked for."""
    memory_hard_watermark: float = 1.0
    """Share of an arena that may be taken by what cannot be evicted; producers who want more are told when to retry."""
    pretouch: bool = True
    """Back the arena with physical pages in the background at start, so that first writes run at memory speed."""
    huge_pages: bool = True
    """Use huge pages where the host offers them."""
    verify_threads: int = 2
    """Threads that check bytes."""
    lease_ttl_seconds: float = 30.0
    """How long a lease lasts if it is not renewed."""
    reservation_ttl_seconds: float = 60.0
    """How long a producer may write without renewing."""
    linger_seconds: float = 300.0
    """How long a payload stays when nobody references it, unless its producer says otherwise."""
    ttl_seconds: float = 3600.0
    """How long after commit a payload may be acquired, unless its producer says otherwise."""
    payloads_max: int = 200_000
    """Most payloads at once, in all states, for each tenant."""
    references_max: int = 400_000
    """Most reservations, holds and leases at once, for each tenant."""
    references_per_client_max: int = 100_000
    """Most reservations, holds and leases of one client at once."""
    tombstones_max: int = 1024
    """Most ended payloads whose reason and text are remembered, for each tenant."""
    tombstone_bytes_max: int = 64 << 20
    """Most bytes of text and token ids that are remembered for ended payloads, for each tenant."""
    sessions_max: int = 4096
    """Most local clients at once."""
    sessions_per_uid_max: int = 4096
    """Most local clients of one user at once."""
    concurrent_calls_max: int = 2048
    """Most gRPC calls at once; more are refused."""
    calls_per_connection_max: int = 1024
    """Most calls at once over one connection; more wait at the client."""
    message_bytes_max: int = 24 << 20
    """Largest gRPC message: room for the longest text and token list together. Compressed ones are refused."""
    metadata_bytes_max: int = 16 << 10
    """Most bytes of metadata that come with one call."""
    request_seconds_max: float = 60.0
    """How long the message of a call, or the first of an upload, may take to arrive."""
    connection_idle_seconds: float = 3600.0
    """How long a connection without calls stays open; 0 for as long as its client likes."""
    connection_seconds_max: float = 3600.0
    """How long a connection lasts; its last calls may take `download_seconds_max` longer. 0 for as long as it likes."""
    streams_max: int = 512
    """Most uploads, downloads and other streams at once, those of events apart; fewer than calls, which need room."""
    streams_per_client_max: int = 128
    """The same for one client."""
    answers_remembered_max: int = 1024
    """Most answers kept for clients that repeat a request."""
    answer_bytes_remembered_max: int = 64 << 20
    """Most bytes of such answers, which may carry texts and token ids."""
    unmeasured_tokens_min: int = 512
    """Fewest tokens that are handed over as a cache while nobody has measured what a prefill costs."""
    journal_records_max: int = 4096
    """Most handoffs whose checks and outcome are remembered."""
    journal_file: str = ""
    """File that every handoff is appended to as a line of JSON; empty for none."""
    journal_file_bytes_max: int = 64 << 20
    """Bytes after which that file is renamed and a new one is begun."""
    journal_files_max: int = 4
    """Most files of the journal, the one that is being written included; the oldest is deleted."""
    breakers_max: int = 4096
    """Most routes between two model versions whose outcomes are counted."""
    catalog: str = ""
    """Path of the YAML file with models, aligners, routes and defaults; empty if the API changes them."""
    catalog_poll_seconds: float = 1.0
    """How often that file is looked at for changes; SIGHUP makes it be read at once."""
    provenance_seconds: float = 3600.0
    """How long it is remembered, after its end, where a payload came from and who received it."""
    provenance_payloads_max: int = 65_536
    """Most ended payloads of which that is remembered, for each tenant; live ones always are."""
    provenance_handoffs_max: int = 262_144
    """Most handoffs of which it is remembered who received what, for each tenant."""
    quarantines_max: int = 256
    """Most quarantines in force, for each tenant."""
    quarantine_file: str = ""
    """File that keeps quarantines over restarts; empty if the end of the node may end them."""
    kill_switch_file: str = ""
    """File that keeps the kill switch, as it was set by a call, over restarts; empty if the node's end may end it."""
    text_store: str = ""
    """SQLite file that keeps the texts of payloads over restarts, in plain text; empty for none."""
    text_store_bytes_max: int = 256 << 20
    """Most bytes of texts and token ids in that file, for all tenants; the oldest make room. It takes some more."""
    text_store_seconds: float = 7200.0
    """How long a text is kept there after its payload was committed, and again after that ended, by the wall clock."""
    watches_max: int = 1024
    """Most streams of events at once."""
    watches_per_client_max: int = 4
    """Most streams of events of one client at once."""
    watch_events_max: int = 16_384
    """Most events that are kept for a client that is slow to read them, or away."""
    lease_expiring_seconds: float = 10.0
    """Before its end a client that watches is told of its lease, but not before two thirds have passed; 0 for never."""
    probe_sample_tokens: int = 64
    """Tokens of a payload that are probed at commit where the catalog has a fingerprint of its model; 0 for all."""
    peers: str = ""
    """Other nodes and their gRPC addresses: NODE=HOST:PORT, separated by spaces."""
    peer_tls_ca: str = ""
    """PEM file with the authorities of other nodes' certificates; empty for those in `tls_client_ca`."""
    peer_tls_certificate: str = ""
    """PEM file with the certificate that is shown to other nodes; empty for the one in `tls_certificate`."""
    peer_tls_key: str = ""
    """PEM file with the private key of that certificate."""
    peer_tls_name: str = "host"
    """What another node's certificate must name: the `host` that it is reached at, or the `node` by its name."""
    peer_token_file: str = ""
    """File whose first line is the bearer token that is shown to other nodes; empty if certificates are enough."""
    bulk_listen: str = ""
    """TCP address from which other nodes pull bytes; empty if they come over gRPC. Port 0 lets the system choose."""
    bulk_port_told: int = 0
    """Port that other nodes are told to pull from, where addresses are translated; 0 for the one listened on."""
    peer_open_seconds: float = 2.0
    """How long another node may take to say whether it has a payload."""
    peer_pull_seconds: float = 60.0
    """How long the bytes of one payload may take from another node."""
    peer_check_seconds: float = 1.0
    """How long after its last answer another node is taken not to have been restarted."""
    peer_stall_seconds: float = 5.0
    """How long another node may send nothing while its bytes are awaited."""
    directory: str = field(default="", repr=False)
    """Where other nodes are: static, dns:HOST:PORT, redis://HOST:PORT/DB or none; empty for static with `peers`."""
    directory_prefix: str = "kvbridge"
    """Starts every key in Redis; nodes with another one know nothing of each other."""
    directory_ttl_seconds: float = 10.0
    """How long a directory remembers a node that is not heard of; names are resolved twice in this time."""
    directory_key_ttl_seconds: float = 300.0
    """How long a directory remembers a key; each is announced again three times in this time."""
    directory_timeout_seconds: float = 0.25
    """How long a directory, or a node that is asked for keys in its stead, may take to answer."""
    heartbeat_seconds: float = 0.5
    """How often the directory and every other node hear of this one."""
    advertise: str = ""
    """Address at which other nodes reach this one, told to the directory; empty for `listen`."""
    replica_linger_seconds: float = 300.0
    """How long a replica of another node's payload stays when nobody references it."""
    prefetch_seconds: float = 60.0
    """How long a payload that is prefetched may take."""
    prefetches_max: int = 64
    """Most payloads that are prefetched at once, for each tenant."""
    prefetches_per_client_max: int = 16
    """Most of them that one client may have asked for."""
    prefetch_bytes_max: int = _GIB
    """Most bytes that are prefetched at once, for each tenant."""
    upload_seconds_max: float = 600.0
    """How long one upload may take."""
    download_seconds_max: float = 600.0
    """How long one download, or another stream but one of events, may take."""
    chunk_bytes: int = 1 << 20
    """Size of a chunk that the node streams."""
    reflection: bool = True
    """Serve gRPC reflection."""
    drain_seconds: float = 10.0
    """How long a stopping node waits for its leases to come home."""

    def __post_init__(self) -> None:
        """Check every range.

        Raises:
            ConfigurationError: naming the setting.
        """
        for setting in fields(self):
            self._check(setting.name)
        if not self.socket:
            raise ConfigurationError("socket: must name a path")
        if not is_node_id(self.node_id):
            raise ConfigurationError(f"node_id: must be what a host may be called, got {self.node_id!r}")
        self._check_socket_mode()
        self._check_tls()
        self._check_peers()
        self._check_directory()
        for name in ("listen", "metrics_listen", "bulk_listen"):
            if getattr(self, name):
                self._check_listen(name, getattr(self, name))

    def peer_targets(self) -> dict[str, str]:
        """Return the address of each other node by its name.

        Raises:
            ConfigurationError: an entry is no NODE=HOST:PORT, or a node is there twice or is this one.
        """
        targets: dict[str, str] = {}
        for entry in self.peers.split():
            node_id, _, target = entry.partition("=")
            if not is_node_id(node_id) or not target or node_id in targets or node_id == self.node_id:
                raise ConfigurationError(f"peers: {entry!r} must be NODE=HOST:PORT for another node, each once")
            targets[node_id] = target
        return targets

    @property
    def directory_in_force(self) -> str:
        """Return which directory is used where none is named."""
        return self.directory or ("static" if self.peers.split() else "none")

    def may_call(self, target: str) -> bool:
        """Tell whether another node may be called at an address that a directory has told."""
        return self.pulls_by_tls or self.insecure or is_loopback(target)

    def _check_directory(self) -> None:
        kind, _, rest = self.directory_in_force.partition(":")
        is_server = kind in {"redis", "rediss"}
        if not (is_server or kind == "dns" or self.directory_in_force in {"none", "static", "memory"}):
            raise ConfigurationError(
                "directory: must be none, static, memory, dns:HOST:PORT, redis://HOST:PORT/DB or rediss://..."
            )
        for name in _DIRECTORY_DURATIONS:
            self._check_range(name, getattr(self, name), _POSITIVE_SECONDS_MIN, DURATION_SECONDS_MAX)
        if kind == "dns":
            self._check_address("directory", rest)
            if self.pulls_by_tls and self.peer_tls_name == "node":
                raise ConfigurationError("peer_tls_name: must be host with dns, which knows no names of nodes")
        if self.advertise:
            self._check_address("advertise", self.advertise)
        elif is_server and self.listen.rpartition(":")[0].strip("[]") in {"0.0.0.0", "::"}:  # noqa: S104 - it is refused
            raise ConfigurationError("advertise: is required where listen names no address that other nodes can call")

    def _check_address(self, name: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise ConfigurationError(f"{name}: must be HOST:PORT with a port of at most {PORT_MAX}, got {address!r}")

    def _check_listen(self, name: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        # grpc takes a larger port modulo 65536 and says nothing.
        if not host or not port.isdecimal() or int(port) > PORT_MAX:
            raise ConfigurationError(f"{name}: must be HOST:PORT with a port of at most {PORT_MAX}, got {address!r}")
        if self.insecure or is_loopback(address):
            return
        if not self.tls_certificate:
            raise ConfigurationError(
                f"{name}: {address!r} is not a loopback address; give tls_certificate and tls_key, "
                "or set insecure to allow it without encryption"
            )
        if not self.access:
            raise ConfigurationError(
                f"{name}: {address!r} is not a loopback address; give access, the file that says who may call, "
                "or set insecure to let everybody"
            )

    def _check_socket_mode(self) -> None:
        if not _SOCKET_MODE.fullmatch(self.socket_mode):
            raise ConfigurationError(f"socket_mode: must be octal digits such as 0660, got {self.socket_mode!r}")
        if not self.socket_is_private and not self.access and not self.insecure:
            raise ConfigurationError(
                "socket_mode: lets other users in; give access, the file that says who may call, "
                "or set insecure to let everybody"
            )

    @property
    def socket_mode_bits(self) -> int:
        """Return the mode of both sockets."""
        return int(self.socket_mode, 8)

    @property
    def socket_is_private(self) -> bool:
        """Tell whether nobody but the node's own user can open the sockets."""
        return not self.socket_mode_bits & _OTHERS_MODE

    def _check_tls(self) -> None:
        for certificate, key in (("tls_certificate", "tls_key"), ("peer_tls_certificate", "peer_tls_key")):
            if bool(getattr(self, certificate)) != bool(getattr(self, key)):
                raise ConfigurationError(f"{certificate}: is of use together with {key} alone")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigurationError("tls_client_ca: is of use together with tls_certificate alone")
        if self.peer_tls_certificate and not self.pulls_by_tls:
            raise ConfigurationError("peer_tls_certificate: is of use together with peer_tls_ca alone")
        if self.peer_tls_name not in PEER_TLS_NAMES:
            raise ConfigurationError(f"peer_tls_name: must be one of {', '.join(PEER_TLS_NAMES)}")

    def _check_peers(self) -> None:
        for node_id, target in self.peer_targets().items():
            if not (self.pulls_by_tls or self.insecure or is_loopback(target)):
                raise ConfigurationError(
                    f"peers: {node_id}={target} is not on the loopback; give peer_tls_ca, "
                    "or set insecure to pull from there without encryption"
                )

    @property
    def pulls_by_tls(self) -> bool:
        """Tell whether connections to other nodes are secured."""
        return bool(self.peer_tls_ca or self.tls_client_ca)

    def _check(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool | str):
            return
        if name.endswith("_watermark"):
            self._check_range(name, value, _WATERMARK_MIN, 1.0)
        elif name.endswith(("_seconds", "_seconds_max")):
            self._check_range(name, value, _POSITIVE_SECONDS_MIN if name in _POSITIVE else 0, DURATION_SECONDS_MAX)
        else:
            self._check_range(name, value, 0 if name in _MAY_BE_ZERO else 1, _MAXIMA.get(name, INTEGER_MAX))

    def _check_range(self, name: str, value: float, least: float, most: float) -> None:
        if not least <= value <= most:
            raise ConfigurationError(f"{name}: must lie in [{least}, {most}], got {value}")

    @property
    def descriptor_socket(self) -> str:
        """Return the path of the descriptor socket."""
        return descriptor_socket_path(self.socket)

    def limits(self) -> dict[str, float]:
        """Return every numeric setting by name, as shown to those who inspect the node."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }


def setting_meanings() -> dict[str, str]:
    """Return what each setting means, as it is written below its declaration."""
    [declaration] = ast.parse(inspect.getsource(BridgeConfig)).body
    assert isinstance(declaration, ast.ClassDef)
    meanings = {}
    for statement, after in pairwise(declaration.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr)
            meanings[statement.target.id] = str(ast.literal_eval(after.value))
    return meanings


def load_config(
    path: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> BridgeConfig:
    """Join the TOML file at `path`, `KVBRIDGE_*` variables and `overrides`; later ones win.

    Raises:
        ConfigurationError: the file cannot be read, or a setting is unknown, of the wrong type or out of range.
    """
    settings = {**_from_file(path), **_from_environment(environment), **(overrides or {})}
    return replace(BridgeConfig(), **settings)


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return {name: _typed(name, value, source=path) for name, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {ENVIRONMENT_PREFIX + setting.name.upper(): setting.name for setting in fields(BridgeConfig)}
    given = {variable: name for variable, name in names.items() if variable in environment}
    return {name: _parsed(name, environment[variable], source=variable) for variable, name in given.items()}


def _typed(name: str, value: object, *, source: str) -> object:
    wanted = _types().get(name)
    if wanted is None:
        raise ConfigurationError(f"{source}: there is no setting {name!r}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ConfigurationError(f"{source}: {name} must be {wanted.__name__}, got {type(value).__name__}")
    return value


def _parsed(name: str, text: str, *, source: str) -> object:
    wanted = _types()[name]
    if wanted is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ConfigurationError(f"{source}: must be one of {', '.join(words)}, got {text!r}")
        return words[text.lower()]
    try:
        return wanted(text)
    except ValueError as error:
        raise ConfigurationError(f"{source}: must be {wanted.__name__}, got {text!r}") from error


def _types() -> dict[str, type]:
    named: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
    return {setting.name: named[str(setting.type)] for setting in fields(BridgeConfig)}
