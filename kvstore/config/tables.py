"""The tables of the configuration: their keys, defaults, meaning and limits."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from kvstore.errors import ConfigError
from kvstore.intent import MODES
from kvstore.types import PAGE_BYTES

__all__ = [
    "RANGES",
    "DaemonConfig",
    "EventsConfig",
    "GrpcConfig",
    "HostConfig",
    "IndexConfig",
    "MetricsConfig",
    "NvmeConfig",
    "PlanConfig",
    "Table",
]

# One is filled, one is next, one is emptied, and one must be left to find anything in.
SEGMENTS_MIN = 4
SEGMENTS_MAX = 65_536  # native/src/disk_directory.h: kSegmentsMax
SECRETS_NAME = "secrets.toml"
"""In nvme.directory, beside the directories of the trust groups."""


def default_socket() -> str:
    """A path of this user's: in $XDG_RUNTIME_DIR, in /run for root, else with the uid in /tmp."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if folder:
        return f"{folder}/kvstore.sock"
    return "/run/kvstore.sock" if os.geteuid() == 0 else f"/tmp/kvstore-{os.geteuid()}.sock"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration tables."""


class DaemonConfig(Table, frozen=True):
    """[daemon]

    Attributes:
        socket: path of the Unix socket.
        socket_mode: permission bits of the socket.
        secrets_file: TOML with the tenants' salts; empty = random salts for the life of the daemon.
        heartbeat_s: clients send something at least this often.
        stale_after_s: without a word for this long a session's pins become revocable.
        attach_timeout_s: a connection that has not attached by then is closed.
        stall_s: a slot being filled for longer than this may be filled by another session too.
        sessions_max: most connections at once.
        leases_max: most leases of one session.
        self_check_s: the daemon checks its own laws this often, in the background (0 = never).
        log_level: debug, info, warning or error.
        keep_arena: a holder process, or systemd's descriptor store, keeps arenas for the next daemon.
        keep_arena_s: how long the holder waits for one.
        state_dir: directory for what the daemon learns and keeps across restarts; empty = nothing is kept.
        admins: names or ids of the machine's users, separated by commas, whose tools may ask for its state,
            check and flush it; empty = all whom `socket_mode` lets in. Root and the daemon's own user always
            may.
        lookup_time_s: a lookup is answered so long after it came at the earliest, whatever it found; 0 = at
            once.
    """

    socket: str = msgspec.field(default_factory=default_socket)
    socket_mode: int = 0o600
    secrets_file: str = ""
    heartbeat_s: float = 1.0
    stale_after_s: float = 5.0
    attach_timeout_s: float = 10.0
    stall_s: float = 5.0
    sessions_max: int = 2048
    leases_max: int = 8192
    self_check_s: float = 60.0
    log_level: str = "info"
    keep_arena: bool = False
    keep_arena_s: float = 600.0
    state_dir: str = ""
    admins: str = ""
    lookup_time_s: float = 0.0


class HostConfig(Table, frozen=True):
    """[host]

    Attributes:
        capacity_bytes: size of one trust group's arena; every group has its own.
        slab_bytes: unit in which the arena changes hands between block sizes; a block must fit in one.
        huge_pages: ask for 2 MiB pages.
        lock: mlock the arena.
        threads: threads that prefault it at start (0 = all cores).
        limit_bytes_per_s: for experiments: of one trust group no more than this is let out of the arena;
            1 = a stall, 0 = no limit.
        added_latency_s: for experiments: what is in the arena, or came into it, is let out so much later.
    """

    capacity_bytes: int = 1 << 30
    slab_bytes: int = 32 << 20
    huge_pages: bool = True
    lock: bool = False
    threads: int = 0
    limit_bytes_per_s: int = 0
    added_latency_s: float = 0.0


class IndexConfig(Table, frozen=True):
    """[index]

    Attributes:
        nodes_max: most block keys known at once, hollow ones included (about 96 bytes each).
    """

    nodes_max: int = 4_000_000


class EventsConfig(Table, frozen=True):
    """[events]

    Attributes:
        log_max: events kept for subscribers that fell behind; older ones need a snapshot.
        zmq: where events are published in vLLM's schema: tcp://host:port or ipc:///path; with several trust
            groups group=endpoint, separated by commas; empty = off.
        zmq_replay: where subscribers ask for what they missed, and for a snapshot; written as `zmq`.
        zmq_topic: first frame of every message.
        zmq_form: events as array (all versions of vLLM, SGLang) or as map (vLLM's own since 0.32).
        zmq_insecure: allow endpoints that other machines reach.
    """

    log_max: int = 10_000
    zmq: str = ""
    zmq_replay: str = ""
    zmq_topic: str = ""
    zmq_form: str = "array"
    zmq_insecure: bool = False


class MetricsConfig(Table, frozen=True):
    """[metrics]

    Attributes:
        listen: `host:port` ([::1]:port for IPv6, port 0 = any free one) or `unix:/path`; empty = not served.
        tenants: what labels call them: names, digests (that tell nothing of the names), or none (all are
            one).
    """

    listen: str = ""
    tenants: str = "names"

    @property
    def socket_path(self) -> str:
        """Path of the Unix socket, "" for TCP."""
        return self.listen.removeprefix("unix:") if self.listen.startswith("unix:") else ""

    @property
    def host_port(self) -> tuple[str, int]:
        """Address for TCP.

        Raises:
            ConfigError: it is none.
        """
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise ConfigError(
                f"metrics.listen: need host:port such as 127.0.0.1:9464, or unix:/path, got {self.listen!r}"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)

    def check(self) -> None:
        """Raises ConfigError unless `listen` is empty or an address, and `tenants` a word of the above."""
        if self.tenants not in ("names", "digests", "none"):
            raise ConfigError(f"metrics.tenants: need names, digests or none, got {self.tenants!r:.40}")
        if len(self.socket_path.encode()) > 107:  # sockaddr_un
            raise ConfigError(
                "metrics.listen: a Unix socket's path has at most 107 bytes (the kernel's limit)"
            )
        if self.listen == "unix:" or (self.listen and not self.socket_path):
            _ = self.host_port


class GrpcConfig(Table, frozen=True):
    """[grpc]

    Attributes:
        listen: addresses, separated by commas: unix:/path or host:port; "auto" = a socket beside
            daemon.socket (kvstore-grpc.sock beside kvstore.sock); empty = off.
        insecure_tcp: allow host:port in plaintext, or with TLS that lets anybody in.
        tls_certificate, tls_key: PEM files: host:port speaks TLS. The key's must be this user's alone.
        tls_clients: PEM file of authorities: callers of host:port need a certificate of one of these.
        tokens_file: TOML of bearer tokens (`kvstore token`): callers of host:port need one.
        tokens_on_unix: callers of Unix sockets need one, too.
        message_bytes_max: most bytes of one request message.
        blocks_max: most blocks of one chain.
        tokens_max: most token ids of one request.
        calls_max: most calls at once, streams included.
        streams_max: most Fetch and Save streams at once.
        buffer_bytes_max: most bytes that all streams together hold between arena and wire.
        subscribers_max: most Subscribe streams at once.
        leases_max: most leases of all callers together.
        lease_s: life of a lease that its caller does not use.
        stall_s: a stream whose caller neither reads nor sends for so long is ended.
        stop_s: how long calls may go on when the daemon stops.
        copy_threads: threads that copy and sum block bytes.
    """

    listen: str = "auto"
    insecure_tcp: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    tls_clients: str = ""
    tokens_file: str = ""
    tokens_on_unix: bool = False
    message_bytes_max: int = 4 << 20
    blocks_max: int = 65_536
    tokens_max: int = 1 << 18  # reading 2¹⁸ varints off the wire holds the loop for some 3 ms
    calls_max: int = 512
    streams_max: int = 32
    buffer_bytes_max: int = 256 << 20
    subscribers_max: int = 64
    leases_max: int = 4096
    lease_s: float = 30.0
    stall_s: float = 30.0
    stop_s: float = 2.0
    copy_threads: int = 1

    def check(self) -> None:
        """Raises ConfigError: names a key that is of no use without another."""
        for key, value, needs, needed in (
            ("tls_key", self.tls_key, "tls_certificate", self.tls_certificate),
            ("tls_certificate", self.tls_certificate, "tls_key", self.tls_key),
            ("tls_clients", self.tls_clients, "tls_certificate", self.tls_certificate),
            ("tokens_on_unix", self.tokens_on_unix, "tokens_file", self.tokens_file),
        ):
            if value and not needed:
                raise ConfigError(f"grpc.{key}: of no use without grpc.{needs}; set both")


class NvmeConfig(Table, frozen=True):
    """[nvme]

    Attributes:
        directory: where blocks outlive the daemon; every trust group gets a subdirectory of its name; empty =
            no NVMe tier.
        capacity_bytes: size of one trust group's segment files; at least four segments.
        segment_bytes: size of one segment file, the unit in which bytes leave the disk; a block must fit in
            one.
        write_budget_bytes_per_day: most bytes of one trust group that are written in a day; -1 = once the
            capacity, 0 = no limit.
        io: uring, threads, or auto = io_uring where the kernel allows it.
        depth: requests under way at once.
        direct: O_DIRECT, past the page cache.
        threads: threads that verify what was read.
        stall_s: a fetch that brings nothing for so long ends with what has arrived.
        write_queue_bytes: most bytes of blocks that are accepted and not yet written; HOST keeps them so
            long.
        limit_bytes_per_s: for experiments: of one trust group no more than this arrives from the disk; 1 = a
            stall, 0 = no limit.
        added_latency_s: for experiments: what the disk has read arrives so much later.
    """

    directory: str = ""
    capacity_bytes: int = 16 << 30
    segment_bytes: int = 128 << 20
    write_budget_bytes_per_day: int = -1
    io: str = "auto"
    depth: int = 64
    direct: bool = True
    threads: int = 1
    stall_s: float = 1.0
    write_queue_bytes: int = 256 << 20
    limit_bytes_per_s: int = 0
    added_latency_s: float = 0.0

    @property
    def budget_bytes_per_day(self) -> int:
        """`write_budget_bytes_per_day` with -1 made a number; 0 = no limit."""
        budget = self.write_budget_bytes_per_day
        return self.capacity_bytes if budget < 0 else budget

    def check(self, groups: Sequence[str]) -> None:
        """Raises ConfigError for values that do not fit each other, or a group that can have no directory."""
        if self.io not in ("auto", "uring", "threads"):
            raise ConfigError("nvme.io: need auto, uring or threads")
        if self.segment_bytes % PAGE_BYTES:
            raise ConfigError(f"nvme.segment_bytes: need a multiple of 4 KiB, got {self.segment_bytes}")
        segments = self.capacity_bytes // self.segment_bytes
        if not SEGMENTS_MIN <= segments <= SEGMENTS_MAX:
            fix = "raise it, or lower" if segments < SEGMENTS_MIN else "lower it, or raise"
            raise ConfigError(
                f"nvme.capacity_bytes: {self.capacity_bytes} holds {segments} segments of nvme.segment_bytes "
                f"= {self.segment_bytes}, need {SEGMENTS_MIN} to {SEGMENTS_MAX}; {fix} nvme.segment_bytes"
            )
        for group in groups if self.directory else ():
            if group.startswith(".") or group == SECRETS_NAME:
                raise ConfigError(
                    f"tenants.group: {group!r} cannot be a directory in nvme.directory; choose another name"
                )


class PlanConfig(Table, frozen=True):
    """[plan]

    Attributes:
        mode: what is done with a match: decide (compare loading with computing for every request), or for
            experiments load (all that is known, however slow) or recompute (load nothing).
    """

    mode: str = "decide"

    def check(self) -> None:
        """Raises ConfigError for a mode that there is not."""
        if self.mode not in MODES:
            raise ConfigError(f"plan.mode: need one of {', '.join(MODES)}, got {self.mode!r:.40}")


# key → (least, most); limits with their reason beside them.
RANGES: dict[str, tuple[float, float]] = {
    "daemon.heartbeat_s": (0.05, 60),
    "daemon.stale_after_s": (0.1, 3600),
    "daemon.attach_timeout_s": (0.1, 600),
    "daemon.stall_s": (0.05, 3600),
    "daemon.keep_arena_s": (1, 86_400),
    "daemon.sessions_max": (1, 65_536),
    "daemon.leases_max": (1, 1 << 24),
    "daemon.self_check_s": (0, 86_400),
    "daemon.socket_mode": (0, 0o777),
    "daemon.lookup_time_s": (0, 20),
    "host.capacity_bytes": (2 << 20, 1 << 44),  # slot ids are 32-bit page numbers: 16 TiB
    "host.slab_bytes": (2 << 20, 1 << 30),  # no slab may cross a 1 GiB registration border
    "host.threads": (0, 256),  # native/src/arena.cc: kThreadsMax
    "host.limit_bytes_per_s": (0, 1 << 40),
    "host.added_latency_s": (0, 60),
    "index.nodes_max": (16, 1 << 31),
    "events.log_max": (1, 10_000_000),
    "grpc.message_bytes_max": (64 << 10, 1 << 30),  # 64 KiB: a chain of some thousand tokens
    "grpc.blocks_max": (1, 262_144),  # what a walk of the index takes
    "grpc.tokens_max": (1, 1 << 24),
    "grpc.calls_max": (1, 65_536),
    "grpc.streams_max": (1, 512),  # half of the copier's queue: it never refuses
    "grpc.buffer_bytes_max": (1 << 20, 1 << 40),
    "grpc.subscribers_max": (0, 65_536),
    "grpc.leases_max": (1, 1 << 20),
    "grpc.lease_s": (0.1, 3600),
    "grpc.stall_s": (0.1, 3600),
    "grpc.stop_s": (0, 600),
    "grpc.copy_threads": (1, 64),
    "nvme.capacity_bytes": (4 << 20, 1 << 46),
    "nvme.segment_bytes": (
        1 << 20,
        1 << 30,
    ),  # native/src/disk_directory.h: kSegmentBytesMin, kSegmentBytesMax
    "nvme.write_budget_bytes_per_day": (-1, 1 << 50),
    "nvme.depth": (1, 1024),  # native/src/disk.h: kDepthMax
    "nvme.threads": (1, 64),
    "nvme.stall_s": (0.01, 3600),
    "nvme.write_queue_bytes": (1 << 20, 1 << 40),
    "nvme.limit_bytes_per_s": (0, 1 << 40),
    "nvme.added_latency_s": (0, 60),
}
