"""What of a configuration decides where a daemon is reached, and what asks a caller for a right there."""

from __future__ import annotations

from kvstore.config import Config

__all__ = ["DISK_KEYS", "EVENT_KEYS", "GRPC_KEYS", "METRICS_KEYS", "door_facts"]

GRPC_KEYS = (
    "grpc.listen",
    "grpc.tls_certificate",
    "grpc.tls_clients",
    "grpc.tokens_file",
    "grpc.tokens_on_unix",
)
METRICS_KEYS = ("metrics.listen",)
DISK_KEYS = ("nvme.directory", "daemon.secrets_file")
EVENT_KEYS = ("events.zmq", "events.zmq_replay")


def door_facts(config: Config) -> dict[str, str]:
    """Key → value as text; addresses and paths, nothing that is secret."""
    found = {}
    for path in (*GRPC_KEYS, *METRICS_KEYS, *DISK_KEYS, *EVENT_KEYS):
        table, _, key = path.partition(".")
        found[path] = str(getattr(getattr(config, table), key))
    return found
