"""Every setting of a node, in one frozen dataclass."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, fields

from kvbridge.config.addresses import default_socket_path, descriptor_socket_path, is_loopback
from kvbridge.config.checks import check
from kvbridge.config.errors import ConfigurationError
from kvbridge.core.handoff_reference import is_node_id

_GIB = 1 << 30
_OTHERS_MODE = 0o077


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
    calls_per_connection_max: int = 2048
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
    """Most answers kept for clients that repeat a request, for each tenant."""
    answer_bytes_remembered_max: int = 64 << 20
    """Most bytes of such answers, which may carry texts and token ids, for all tenants, who have even shares."""
    unmeasured_tokens_min: int = 512
    """Fewest tokens that are handed over as a cache while nobody has measured what a prefill costs."""
    journal_records_max: int = 4096
    """Most handoffs whose checks and outcome are remembered, for all tenants, who have even shares."""
    journal_file: str = ""
    """File that every handoff is appended to as a line of JSON; empty for none."""
    journal_file_bytes_max: int = 64 << 20
    """Bytes after which that file is renamed and a new one is begun."""
    journal_files_max: int = 4
    """Most files of the journal, the one that is being written included; the oldest is deleted."""
    breakers_max: int = 4096
    """Most routes between two model versions whose outcomes are counted, for each tenant."""
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
    """Where others are: none, static, memory, dns:HOST:PORT, redis://HOST:PORT/DB, rediss://...; empty: by `peers`."""
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
        """Check every setting.

        Raises:
            ConfigurationError: naming the setting.
        """
        check(self)

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

    @property
    def socket_mode_bits(self) -> int:
        """Return the mode of both sockets."""
        return int(self.socket_mode, 8)

    @property
    def socket_is_private(self) -> bool:
        """Tell whether nobody but the node's own user can open the sockets."""
        return not self.socket_mode_bits & _OTHERS_MODE

    @property
    def pulls_by_tls(self) -> bool:
        """Tell whether connections to other nodes are secured."""
        return bool(self.peer_tls_ca or self.tls_client_ca)

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
