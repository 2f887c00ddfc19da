from collections.abc import Callable, Sequence
from typing import Any

VERSION: int

# The flags in the results of execute(): see server/handler_execute.h.
RESULT_API_KEY: int
RESULT_NOTIFY: int
RESULT_WAITS: int
RESULT_AT_ONCE: int
RESULT_BEGINS: int
# Returned in place of a result: the lock of the partition row ``row`` (an attribute of
# the object) is held; settle the row's intent, and release the lock.
ROW_IS_HELD: int

def layout_names() -> tuple[str, ...]: ...
def configure(values: tuple[int, ...], /) -> None: ...
def spin_lock(address: int, /) -> int: ...
def unlock(address: int, /) -> None: ...
def mark_consistent(address: int, /) -> int: ...
def on_repair(hook: Callable[[], object], /) -> None: ...
def on_wait(hook: Callable[[int], object] | None, /) -> None: ...
def show_waits_at(address: int, /) -> None: ...
def crc32c(data: bytes, /) -> int: ...
def die_at_step(number: int, /) -> None: ...
def steps_done() -> int: ...

class RequestRing:
    def __new__(
        cls,
        view: memoryview,
        base_word: int,
        capacity: int,
        limit: int,
        doorbell_fds: Sequence[int],
        /,
    ) -> RequestRing: ...
    def put(self, slots: Sequence[int], /) -> int: ...
    def take(
        self, max_slots: int, handler: int, handlers: int, /, *, arm: bool
    ) -> list[int]: ...

class ResponseRing:
    def __new__(
        cls,
        view: memoryview,
        base_word: int,
        capacity: int,
        limit: int,
        doorbell_fds: Sequence[int],
        /,
    ) -> ResponseRing: ...
    def push(self, slots: Sequence[int], /) -> None: ...
    def pop(self, *, arm: bool = False) -> list[int]: ...

class HandlerEnd:
    position: int
    offline_changes: int
    row: int
    answer_bytes: int
    syncs_acks_all: bool
    repeatable: dict[bytes, tuple[bytes, bytes]]
    topics: dict[str | bytes, tuple[int, int, int, dict[int, object]]]
    readable: dict[str | bytes, dict[int, object]]
    waiting: dict[int, int]
    has_authorizer: bool
    writers: dict[bytes, set[str | bytes]]
    readers: dict[bytes, set[str | bytes]]
    anybody_writes: set[str | bytes]
    anybody_reads: set[str | bytes]
    def __new__(
        cls,
        control: memoryview,
        arena: memoryview,
        region_bytes: int,
        response_rings: tuple[ResponseRing, ...],
        /,
    ) -> HandlerEnd: ...
    def answer(self, slot: int, kind: int, offset: int, length: int, /) -> None: ...
    def send_bytes(self, slot: int, frame: bytes, /) -> bool: ...
    def flush(self) -> None: ...
    def set_tables(
        self,
        rows: memoryview,
        news_word: int,
        plan_type: type,
        segment_type: type,
        index_type: type,
        time_index_type: type,
        /,
    ) -> None: ...
    def set_producers(
        self,
        plan_type: type,
        state_type: type,
        entry_type: type,
        batch_type: type,
        /,
    ) -> None: ...
    def set_transactions(
        self, table: memoryview, first_word: int, capacity: int, epoch_bits: int, /
    ) -> None: ...
    def set_fetches(
        self, plan_type: type, segment_type: type, handler: int, max_bytes: int, /
    ) -> None: ...
    def set_quotas(
        self, quotas: memoryview, samples: int, window_ns: int, /
    ) -> None: ...
    def set_lane(
        self, lane: ResponseRing, apis: dict[int, tuple[int, int, int]], /
    ) -> None: ...
    clients: dict[bytes, tuple[int, int, float, int, int, float]]
    has_quotas: bool
    def set_wait(
        self, epoll_fd: int, requests: RequestRing, handler: int, handler_row: int, /
    ) -> None: ...
    def wait(
        self, timeout_ms: int, limit: int, may_execute: bool, /
    ) -> tuple[list[int], int, bool, int | None, list[int]]: ...
    def execute(self, slot: int, /) -> int | None: ...
    def answer_key(self, slot: int, /) -> bytes | None: ...
    def fetch(self, slot: int, must_answer: bool, /) -> bool | None: ...
    def appended(self) -> tuple[tuple[int, int, int], ...]: ...
    def fetch_waits(self) -> tuple[int, tuple[int, ...]]: ...

class CoordinatorEnd:
    row: int
    def __new__(
        cls,
        rows: memoryview,
        plan_type: type,
        segment_type: type,
        index_type: type,
        time_index_type: type,
        state_type: type,
        entry_type: type,
        batch_type: type,
        /,
    ) -> CoordinatorEnd: ...
    def append(
        self,
        plan: object,
        records: list[tuple[bytes, bytes | None]],
        now_ms: int,
        /,
    ) -> int | None: ...
    def append_marker(
        self, plan: object, marker: bytes, now_ms: int, /
    ) -> int | None: ...

class ProcessorEnd:
    def __new__(
        cls,
        control: memoryview,
        arena: memoryview,
        counters_word: int,
        first_slot: int,
        channel_type: type,
        reading: int,
        in_flight: int,
        channels_in_flight: list[Any],
        unpublished: list[int],
        processor: int,
        /,
    ) -> ProcessorEnd: ...
    def set_turn(
        self,
        epoll_fd: int,
        requests: RequestRing,
        responses: ResponseRing,
        channels: dict[int, Any],
        doorbell_fd: int,
        news_words: tuple[int, int, int, int],
        /,
    ) -> None: ...
    def turn(
        self, timeout_ms: int, may_stay: bool, /
    ) -> tuple[list[tuple[int, int]], list[tuple[Any, int, int]], int, int, bool]: ...
    def answer(
        self, slots: list[int], now_ns: int, may_receive: bool, /
    ) -> list[tuple[Any, int, int]]: ...
