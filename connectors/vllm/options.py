"""What a user may write into `kv_connector_extra_config`, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.client import default_socket
from kvstore.intent import MODES
from kvstore.types import Reuse

__all__ = ["CONFIG_LINE", "Options", "Wish"]

CONFIG_LINE = (
    '--kv-transfer-config \'{"kv_connector":"KVStoreConnector",'
    '"kv_connector_module_path":"kvstore.connectors.vllm","kv_role":"kv_both",'
    '"kv_load_failure_policy":"recompute"}\''
)


@dataclass(frozen=True, slots=True)
class Options:
    """Everything has a default: an empty `kv_connector_extra_config` is fine.

    Attributes:
        socket: the daemon's session socket.
        tenant: whose blocks these are.
        reuse: how far they are shared when a request does not say: "own", "group" or "none".
        weights: fingerprint of the weights; "" = computed from the files that vLLM loads.
        copy_threads: native threads that copy, per rank.
        patience_s: how long a scheduler step waits for the answer to a lookup before it goes on without:
            when a request is new, and in every step that would compute nothing otherwise.
        lookup_s: after this long a request is computed, whatever the daemon may still answer.
        fetch_s: how long a request waits for blocks that are read from the disk: then what has come is loaded
            and the rest computed. Other requests go on meanwhile.
        call_s: after this long without an answer the connection to the daemon is given up and made anew.
        attach_s: how long the engine's start waits for a daemon that listens.
        pins_share: part of the device blocks that may be held for their copy, whatever their request does.
    """

    socket: str = ""
    tenant: str = "default"
    reuse: str = "own"
    weights: str = ""
    copy_threads: int = 2
    patience_s: float = 0.002
    lookup_s: float = 0.5
    fetch_s: float = 2.0
    call_s: float = 1.0
    attach_s: float = 10.0
    pins_share: float = 0.1

    @staticmethod
    def parse(extra: Mapping[str, Any]) -> Options:
        """Raises ValueError: the message names the field and what it may be."""
        known: dict[str, Any] = {field.name: type(field.default) for field in fields(Options)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            kind = known.get(name)
            if kind is None:
                raise ValueError(
                    f"kv_connector_extra_config.{name}: unknown; the fields are {', '.join(known)}"
                )
            right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
            if not right:
                raise ValueError(f"kv_connector_extra_config.{name}: need {kind.__name__}, got {value!r:.80}")
            values[name] = kind(value)
        options = Options(**{"socket": default_socket(), **values})
        options._check()
        return options

    def _check(self) -> None:
        if not 0 < len(self.socket.encode()) <= 107:  # sockaddr_un
            raise ValueError("kv_connector_extra_config.socket: need a path of 1 to 107 bytes")
        if self.reuse not in list(Reuse):
            raise ValueError(f"kv_connector_extra_config.reuse: need {_reuses()}, got {self.reuse!r:.80}")
        for name, low, high in (
            ("copy_threads", 1, 64),
            ("patience_s", 0.0, 1.0),
            ("lookup_s", 0.001, 60.0),
            ("fetch_s", 0.0, 60.0),
            ("call_s", 0.01, 600.0),
            ("attach_s", 0.0, 600.0),
            ("pins_share", 0.0, 0.5),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"kv_connector_extra_config.{name}: need {low} to {high}, got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request says of itself.

    Attributes:
        reuse: how far its blocks may be shared; NONE keeps it out of the store.
        plan: as the daemon's `plan.mode`, for this request alone; "" = what the daemon's says.
        reason: why it is kept out, when it asked for something that does not exist; "" otherwise.
    """

    reuse: Reuse
    plan: str = ""
    reason: str = ""

    @staticmethod
    def of(params: object, default: str) -> Wish:
        """Read it.

        Args:
            params: the request's `kv_transfer_params`: {"kvstore": {"reuse": "none", "plan": "recompute"}}.
            default: reuse of a request that says nothing.
        """
        ours = params.get("kvstore") if isinstance(params, Mapping) else None
        if not isinstance(ours, Mapping):
            return Wish(Reuse(default))
        reuse, plan = ours.get("reuse"), ours.get("plan")
        reuse, plan = default if reuse is None else reuse, "" if plan is None else plan
        if reuse not in list(Reuse):
            return Wish(Reuse.NONE, reason=f"kv_transfer_params.kvstore.reuse: need {_reuses()}")
        if plan not in ("", *MODES):
            return Wish(Reuse.NONE, reason=f"kv_transfer_params.kvstore.plan: need {', '.join(MODES)}")
        return Wish(Reuse(reuse), plan)


def _reuses() -> str:
    return ", ".join(f'"{reuse}"' for reuse in Reuse)
