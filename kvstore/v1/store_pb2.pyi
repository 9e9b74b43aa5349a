from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reuse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REUSE_UNSPECIFIED: _ClassVar[Reuse]
    REUSE_OWN: _ClassVar[Reuse]
    REUSE_GROUP: _ClassVar[Reuse]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Choice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHOICE_UNSPECIFIED: _ClassVar[Choice]
    CHOICE_RECOMPUTE: _ClassVar[Choice]
    CHOICE_LOAD: _ClassVar[Choice]
    CHOICE_SPLIT: _ClassVar[Choice]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_CLEARED: _ClassVar[EventKind]
REUSE_UNSPECIFIED: Reuse
REUSE_OWN: Reuse
REUSE_GROUP: Reuse
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_HOST: Tier
TIER_NVME: Tier
TIER_PEER: Tier
TIER_REMOTE: Tier
CHOICE_UNSPECIFIED: Choice
CHOICE_RECOMPUTE: Choice
CHOICE_LOAD: Choice
CHOICE_SPLIT: Choice
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_CLEARED: EventKind

class Namespace(_message.Message):
    __slots__ = ("model", "weights", "tokenizer", "adapter", "attention", "kv_dtype", "layout", "block_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    tokenizer: str
    adapter: str
    attention: str
    kv_dtype: str
    layout: str
    block_tokens: int
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., tokenizer: _Optional[str] = ..., adapter: _Optional[str] = ..., attention: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "block_tokens", "cell_format", "kernel_block_tokens", "attention", "groups")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CELL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KERNEL_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    cell_format: str
    kernel_block_tokens: int
    attention: str
    groups: str
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., cell_format: _Optional[str] = ..., kernel_block_tokens: _Optional[int] = ..., attention: _Optional[str] = ..., groups: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "extra")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    extra: _containers.ScalarMap[int, bytes]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., extra: _Optional[_Mapping[int, bytes]] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("tenant", "reuse", "namespace", "layout", "tokens", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    reuse: Reuse
    namespace: Namespace
    layout: Layout
    tokens: Tokens
    keys: Keys
    def __init__(self, tenant: _Optional[str] = ..., reuse: _Optional[_Union[Reuse, str]] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("tier", "start", "stop")
    TIER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    start: int
    stop: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class LoadPlan(_message.Message):
    __slots__ = ("load_start", "load_stop", "spans", "reason", "choice", "predictions")
    LOAD_START_FIELD_NUMBER: _ClassVar[int]
    LOAD_STOP_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    load_start: int
    load_stop: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    reason: str
    choice: Choice
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    def __init__(self, load_start: _Optional[int] = ..., load_stop: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., reason: _Optional[str] = ..., choice: _Optional[_Union[Choice, str]] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("choice", "seconds")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    choice: Choice
    seconds: float
    def __init__(self, choice: _Optional[_Union[Choice, str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Intent(_message.Message):
    __slots__ = ("prompt_tokens", "request", "queued_s", "can_split", "decodes", "decode_context", "chunk_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    CAN_SPLIT_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    request: str
    queued_s: float
    can_split: bool
    decodes: int
    decode_context: int
    chunk_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., request: _Optional[str] = ..., queued_s: _Optional[float] = ..., can_split: _Optional[bool] = ..., decodes: _Optional[int] = ..., decode_context: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("chain", "intent")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    intent: Intent
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., intent: _Optional[_Union[Intent, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("epoch", "lease", "lease_s", "asked_blocks", "blocks", "block_bytes", "plan", "root")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    lease: bytes
    lease_s: float
    asked_blocks: int
    blocks: int
    block_bytes: int
    plan: LoadPlan
    root: bytes
    def __init__(self, epoch: _Optional[bytes] = ..., lease: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., asked_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., plan: _Optional[_Union[LoadPlan, _Mapping]] = ..., root: _Optional[bytes] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("chain", "intent")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    intent: Intent
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., intent: _Optional[_Union[Intent, _Mapping]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("epoch", "asked_blocks", "blocks", "block_bytes", "plan", "root")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    asked_blocks: int
    blocks: int
    block_bytes: int
    plan: LoadPlan
    root: bytes
    def __init__(self, epoch: _Optional[bytes] = ..., asked_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., plan: _Optional[_Union[LoadPlan, _Mapping]] = ..., root: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease", "chain", "start", "stop")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    chain: Chain
    start: int
    stop: int
    def __init__(self, lease: _Optional[bytes] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("header", "data", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: FetchHeader
    data: FetchData
    end: FetchEnd
    def __init__(self, header: _Optional[_Union[FetchHeader, _Mapping]] = ..., data: _Optional[_Union[FetchData, _Mapping]] = ..., end: _Optional[_Union[FetchEnd, _Mapping]] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("epoch", "start", "stop", "block_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    start: int
    stop: int
    block_bytes: int
    def __init__(self, epoch: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class FetchData(_message.Message):
    __slots__ = ("block", "offset", "data", "crc32c")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class FetchEnd(_message.Message):
    __slots__ = ("stop", "reason")
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stop: int
    reason: str
    def __init__(self, stop: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, leases: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("epoch", "lease_s", "ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    lease_s: float
    ended: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., ended: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    def __init__(self, lease: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    def __init__(self, epoch: _Optional[bytes] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: SaveHeader
    data: SaveData
    def __init__(self, header: _Optional[_Union[SaveHeader, _Mapping]] = ..., data: _Optional[_Union[SaveData, _Mapping]] = ...) -> None: ...

class SaveHeader(_message.Message):
    __slots__ = ("chain", "start")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    chain: Chain
    start: int
    def __init__(self, chain: _Optional[_Union[Chain, _Mapping]] = ..., start: _Optional[int] = ...) -> None: ...

class SaveData(_message.Message):
    __slots__ = ("data", "crc32c")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc32c: int
    def __init__(self, data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("epoch", "ready", "filled", "elsewhere", "dropped", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    ready: int
    filled: int
    elsewhere: int
    dropped: int
    reason: str
    def __init__(self, epoch: _Optional[bytes] = ..., ready: _Optional[int] = ..., filled: _Optional[int] = ..., elsewhere: _Optional[int] = ..., dropped: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("tenant", "first_tokens", "prefill_steps")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    prefill_steps: _containers.RepeatedCompositeFieldContainer[PrefillStep]
    def __init__(self, tenant: _Optional[str] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., prefill_steps: _Optional[_Iterable[_Union[PrefillStep, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("seconds", "warm")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    warm: bool
    def __init__(self, seconds: _Optional[float] = ..., warm: _Optional[bool] = ...) -> None: ...

class PrefillStep(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seconds: float
    def __init__(self, tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ("epoch", "recorded")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    recorded: int
    def __init__(self, epoch: _Optional[bytes] = ..., recorded: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("tenant", "epoch", "sequence")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    epoch: bytes
    sequence: int
    def __init__(self, tenant: _Optional[str] = ..., epoch: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "last", "snapshot", "event")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    sequence: int
    last: bool
    snapshot: Snapshot
    event: Event
    def __init__(self, epoch: _Optional[bytes] = ..., sequence: _Optional[int] = ..., last: _Optional[bool] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("first", "tier", "engine", "keys")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    first: bool
    tier: Tier
    engine: bytes
    keys: bytes
    def __init__(self, first: _Optional[bool] = ..., tier: _Optional[_Union[Tier, str]] = ..., engine: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "tier", "engine", "parent", "keys")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    tier: Tier
    engine: bytes
    parent: bytes
    keys: bytes
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., engine: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("epoch", "version", "report")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    version: str
    report: _struct_pb2.Struct
    def __init__(self, epoch: _Optional[bytes] = ..., version: _Optional[str] = ..., report: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("epoch", "ok", "broken", "partial")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    ok: bool
    broken: str
    partial: bool
    def __init__(self, epoch: _Optional[bytes] = ..., ok: _Optional[bool] = ..., broken: _Optional[str] = ..., partial: _Optional[bool] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("epoch", "tiers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    tiers: _containers.RepeatedCompositeFieldContainer[TierFlush]
    def __init__(self, epoch: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[TierFlush, _Mapping]]] = ...) -> None: ...

class TierFlush(_message.Message):
    __slots__ = ("tier", "durable", "reason")
    TIER_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    durable: bool
    reason: str
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., durable: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("digest", "namespace", "tenant")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    namespace: Namespace
    tenant: str
    def __init__(self, digest: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("epoch", "dropped_blocks", "idle_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    dropped_blocks: int
    idle_blocks: int
    def __init__(self, epoch: _Optional[bytes] = ..., dropped_blocks: _Optional[int] = ..., idle_blocks: _Optional[int] = ...) -> None: ...
