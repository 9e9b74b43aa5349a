"""What whoever runs the proxy may decide, with its limits."""

from __future__ import annotations

from kvstore.config.tables import Table
from kvstore.errors import ConfigError

__all__ = ["ProxyOptions"]

_SECONDS = ("connect_s", "body_s", "first_byte_s", "idle_s", "client_stall_s", "models_s")


class ProxyOptions(Table, frozen=True):
    """[proxy] of the router's configuration.

    Attributes:
        body_bytes_max: of a caller's body; 16 MiB hold a million tokens, or some pictures.
        headers_max: of a caller's request.
        requests_max: between a request's arrival and the end of its answer; beyond it callers get 429.
            Together with `body_bytes_max` the bound of the memory that callers can take.
        attempts_max: replicas that one request is sent to, one after the other, until a first byte comes.
        body_s: for a caller to send its body.
        connect_s: for a connection to a replica.
        first_byte_s: from sending a request to the first byte of the answer's body: queue and prefill.
        idle_s: between two chunks of an answer.
        client_stall_s: for a caller to take a chunk; one that reads nothing is let go after it.
        models_s: for a replica to tell its models, and how long they are believed.
        session_header: whose value names a conversation.
        slo_header: whose value is the seconds until the first byte that a caller can live with.
        slo_s: of callers that do not say; None = none.
        ask_usage: ask engines for the usage of every stream, so that the core learns the real hit.
        show_placement: tell callers in X-Kvstore-Replica, -Expected-Tokens and -Removed what was done.
    """

    body_bytes_max: int = 16 << 20
    headers_max: int = 100
    requests_max: int = 1024
    attempts_max: int = 3
    body_s: float = 30.0
    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    client_stall_s: float = 120.0
    models_s: float = 5.0
    session_header: str = "x-session-id"
    slo_header: str = "x-kvstore-slo-s"
    slo_s: float | None = None
    ask_usage: bool = True
    show_placement: bool = True

    def check(self) -> None:
        """Raises ConfigError: names the option."""
        for name, least, most in (
            ("body_bytes_max", 1 << 10, 1 << 30),
            ("headers_max", 8, 1000),
            ("requests_max", 1, 100_000),
            ("attempts_max", 1, 16),
            *((name, 0.001, 86_400.0) for name in _SECONDS),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"proxy.{name}: need {least:g} to {most:g}, got {getattr(self, name):g}")
        for name in ("session_header", "slo_header"):
            value = getattr(self, name)
            if not value or not value.isascii() or not value.replace("-", "").isalnum():
                raise ConfigError(f"proxy.{name}: need a header's name, got {value!r:.80}")
        if self.slo_s is not None and not 0 < self.slo_s <= 86_400:
            raise ConfigError(f"proxy.slo_s: need seconds above 0, got {self.slo_s:g}")
