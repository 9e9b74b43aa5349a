from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Prompt(_message.Message):
    __slots__ = ("model", "tokens", "session", "tenant", "slo_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    session: str
    tenant: str
    slo_s: float
    def __init__(self, model: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ..., tenant: _Optional[str] = ..., slo_s: _Optional[float] = ...) -> None: ...

class PickRequest(_message.Message):
    __slots__ = ("prompt", "avoid")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    avoid: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., avoid: _Optional[_Iterable[str]] = ...) -> None: ...

class PickResponse(_message.Message):
    __slots__ = ("ticket", "replica", "url", "expected_tokens", "reason", "cache_salt")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    replica: str
    url: str
    expected_tokens: int
    reason: str
    cache_salt: str
    def __init__(self, ticket: _Optional[int] = ..., replica: _Optional[str] = ..., url: _Optional[str] = ..., expected_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("replicas", "chosen", "reason")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Standing]
    chosen: str
    reason: str
    def __init__(self, replicas: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("replica", "url", "gpu_tokens", "host_tokens", "nvme_tokens", "matched_tokens", "in_flight", "queue_s", "prefill_tokens_per_s", "score_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NVME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_S_FIELD_NUMBER: _ClassVar[int]
    replica: str
    url: str
    gpu_tokens: int
    host_tokens: int
    nvme_tokens: int
    matched_tokens: int
    in_flight: int
    queue_s: float
    prefill_tokens_per_s: float
    score_s: float
    def __init__(self, replica: _Optional[str] = ..., url: _Optional[str] = ..., gpu_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., nvme_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., in_flight: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., score_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[TicketReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[TicketReport, _Mapping]]] = ...) -> None: ...

class TicketReport(_message.Message):
    __slots__ = ("ticket", "first_byte", "finished")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    first_byte: FirstByte
    finished: Finished
    def __init__(self, ticket: _Optional[int] = ..., first_byte: _Optional[_Union[FirstByte, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class FirstByte(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("failed", "cached_tokens", "prompt_tokens", "output_tokens")
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    failed: bool
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    def __init__(self, failed: _Optional[bool] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("replica", "top")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    replica: str
    top: int
    def __init__(self, replica: _Optional[str] = ..., top: _Optional[int] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("number", "of", "prompt_tokens", "cached_tokens", "seconds", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    of: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    error: str
    def __init__(self, number: _Optional[int] = ..., of: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...
