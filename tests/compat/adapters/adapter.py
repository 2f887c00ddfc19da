"""What a compatibility test asks of a client, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, Self

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")


Headers = tuple[tuple[str, bytes | None], ...]


class Outgoing(NamedTuple):
    """A record to publish."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int = 0


class Message(NamedTuple):
    """A record as a consumer was given it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class Adapter(ABC):
    """A client of one library, as a context manager. Errors are the library's own."""

    name: ClassVar[str]

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - most have nothing open between calls
        """Give up whatever is still open."""

    @abstractmethod
    def topics(self) -> dict[str, int]:
        """Return every topic with its number of partitions."""

    @abstractmethod
    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None: ...

    @abstractmethod
    def create_partitions(self, topic: str, total: int) -> None: ...

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Return the partition's new first offset."""

    @abstractmethod
    def topic_config(self, topic: str) -> dict[str, str]: ...

    @abstractmethod
    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None: ...

    @abstractmethod
    def produce(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        codec: str = "none",
        acks: int | str = "all",
        idempotent: bool = False,
        max_request_bytes: int = 1_000_000,
    ) -> list[int]:
        """Publish in order; return each record's offset, -1 if acks=0."""

    @abstractmethod
    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        """Return `count` records; fewer if they did not come in time."""

    @abstractmethod
    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset and the one after the last."""

    @abstractmethod
    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        """Return the first offset at or after a time; None if there is none."""
