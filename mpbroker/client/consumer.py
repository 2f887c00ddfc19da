"""`Consumer`: records from any Kafka broker, alone or as a member of a group.

    with Consumer(bootstrap_servers="localhost:9092", group_id="g") as consumer:
        consumer.subscribe(["events"])
        for record in consumer:
            print(record.partition, record.offset, record.value)

One thread uses a consumer. Records come from `poll` (or iteration), and only there are
partitions given and taken away.

Source: the API of Apache Kafka's KafkaConsumer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError, ClientError
from mpbroker.client.group_member import GroupMember, GroupSettings, RebalancedError
from mpbroker.client.record_fetcher import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    FetchedBatch,
    LeaderLostError,
    OffsetOutOfRangeError,
    RecordFetcher,
)
from mpbroker.client.settings import COMMON_KEYS, integer, parse_settings, text
from mpbroker.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
    one_of,
)
from mpbroker.protocol.record_batch import iter_records

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms

# fmt: off
CONSUMER_CONFIG: Final = ConfigDef("consumer setting", (
    *COMMON_KEYS,
    ConfigKey("group.id", ConfigType.STRING, None, "Whose positions are stored."),
    ConfigKey("group.instance.id", ConfigType.STRING, None,
        "Name of a member that keeps its partitions while it restarts."),
    ConfigKey("auto.offset.reset", ConfigType.STRING, "latest",
        "Where to begin without a position.",
        validator=one_of("earliest", "latest", "none")),
    ConfigKey("enable.auto.commit", ConfigType.BOOLEAN, True,
        "Store positions of what poll() returned, from time to time."),
    ConfigKey("auto.commit.interval.ms", ConfigType.INT, 5000,
        "How often that is.", validator=at_least(0)),
    ConfigKey("session.timeout.ms", ConfigType.INT, 45_000,
        "A member that is silent for so long is dead.", validator=at_least(1)),
    ConfigKey("heartbeat.interval.ms", ConfigType.INT, 3_000,
        "How often a member says it is alive.", validator=at_least(1)),
    ConfigKey("max.poll.interval.ms", ConfigType.INT, 300_000,
        "A member that does not poll for so long gives its partitions up.",
        validator=at_least(1)),
    ConfigKey("max.poll.records", ConfigType.INT, 500,
        "Records of one poll().", validator=at_least(1)),
    ConfigKey("fetch.max.wait.ms", ConfigType.INT, 500,
        "Brokers wait no longer for records.", validator=at_least(0)),
    ConfigKey("fetch.max.bytes", ConfigType.INT, 52_428_800,
        "Bytes of one answer.", validator=at_least(0)),
    ConfigKey("max.partition.fetch.bytes", ConfigType.INT, 1_048_576,
        "Bytes of one partition in an answer.", validator=at_least(0)),
    ConfigKey("isolation.level", ConfigType.STRING, "read_uncommitted",
        "Whether aborted and undecided transactions are left out.",
        validator=one_of("read_uncommitted", "read_committed")),
))
# fmt: on


class ConsumerRecord(NamedTuple):
    """A record, and where it is."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_type: int = 0  # 1: the broker's time (LogAppendTime)


class NoOffsetError(ClientError):
    """A partition has no position, and auto.offset.reset is none."""


class Consumer:
    """See the module."""

    def __init__(
        self, config: Mapping[str, object] | None = None, **settings: object
    ) -> None:
        """Connect to nothing yet.

        Args:
            config: Kafka's settings by name, with dots or underscores.
            settings: more of them, as keyword arguments.

        Raises:
            ConfigError: says which setting, and what to do.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(CONSUMER_CONFIG, {**(config or {}), **settings})
        servers = values["bootstrap.servers"]
        if not isinstance(servers, tuple):
            raise ConfigError(
                "bootstrap.servers is not set; give the HOST:PORT of a broker"
            )
        addresses = parse_addresses(",".join(servers))
        timeout_s = integer(values, "request.timeout.ms") / 1000
        self._values = values
        self._cluster = Cluster(addresses, timeout_s)
        self._member: GroupMember | None = None
        group_id = text(values, "group.id")
        if group_id:
            self._member = GroupMember(
                addresses,
                timeout_s,
                GroupSettings(
                    group_id,
                    text(values, "group.instance.id"),
                    integer(values, "session.timeout.ms"),
                    integer(values, "heartbeat.interval.ms"),
                    integer(values, "max.poll.interval.ms"),
                ),
            )
        self._topics: list[str] = []
        self._assigned: list[TopicPartition] = []
        # By partition: the offset after the last record that poll() returned.
        self._positions: dict[TopicPartition, int] = {}
        self._fetcher: RecordFetcher | None = None
        self._records: deque[ConsumerRecord] = deque()  # fetched, not returned yet
        self._committed_at = time.monotonic()

    # -- what is read ------------------------------------------------------------------

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these partitions, instead of what was read before."""
        self._topics = []
        self._set_assigned([TopicPartition(*partition) for partition in partitions])

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read topics together with the other members of group.id.

        Raises:
            ConfigError: there is no group.id.
        """
        if isinstance(topics, str):
            topics = [topics]
        self._require_member()
        self._topics = list(dict.fromkeys(topics))
        self._set_assigned([])

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read now."""
        return list(self._assigned)

    def _set_assigned(self, partitions: list[TopicPartition]) -> None:
        self._assigned = partitions
        self._records.clear()
        self._positions.clear()
        self._fetcher = None

    def _require_member(self) -> GroupMember:
        if self._member is None:
            raise ConfigError("group.id is not set; groups and commits need one")
        return self._member

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Go on at an offset of a partition that is read."""
        where = TopicPartition(*partition)
        if where not in self._assigned:
            raise ClientError(f"{where} is not assigned; assign or subscribe to it")
        self._positions[where] = offset
        self._records = deque(r for r in self._records if (r[0], r[1]) != where)
        if self._fetcher is not None:
            self._rebuild()

    def seek_to(
        self, timestamp: int, partitions: Iterable[tuple[str, int]] | None = None
    ) -> None:
        """Go to EARLIEST, LATEST or a time in ms, in some partitions or all."""
        wanted = (
            self._assigned
            if partitions is None
            else [TopicPartition(*partition) for partition in partitions]
        )
        for where, offset in self.offsets_for(wanted, timestamp).items():
            self.seek(where, offset)

    def offsets_for(
        self, partitions: Iterable[tuple[str, int]], timestamp: int
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a time (EARLIEST, LATEST, or ms).

        A partition that has none is at its end.
        """
        wanted = [TopicPartition(*partition) for partition in partitions]
        leaders = self._leaders(wanted)
        committed = self._values["isolation.level"] == "read_committed"
        answers = list_offsets(
            self._cluster,
            dict.fromkeys(wanted, timestamp),
            leaders,
            read_committed=committed,
        )
        missing = [where for where, answer in answers.items() if answer.offset < 0]
        ends = list_offsets(self._cluster, dict.fromkeys(missing, LATEST), leaders)
        return {
            where: ends[where].offset if where in ends else answer.offset
            for where, answer in answers.items()
        }

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset that comes next of a partition that is read."""
        where = TopicPartition(*partition)
        if where not in self._positions:
            self._find_positions()
        return self._positions[where]

    def _leaders(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        leaders = {}
        for name in {partition.topic for partition in partitions}:
            for entry in self._cluster.topic(name, auto_create=True).partitions:
                leaders[TopicPartition(name, entry.partition_index)] = entry.leader_id
        return {where: leaders[where] for where in partitions if where in leaders}

    def _find_positions(self) -> None:
        missing = [where for where in self._assigned if where not in self._positions]
        if missing and self._member is not None:
            self._positions |= self._member.committed(missing)
            missing = [where for where in missing if where not in self._positions]
        if missing:
            self._positions |= self._reset(missing)

    def _reset(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        reset = self._values["auto.offset.reset"]
        if reset == "none":
            names = ", ".join(map(str, partitions))
            raise NoOffsetError(
                f"no position for {names}, and auto.offset.reset=none; seek first"
            )
        return self.offsets_for(partitions, EARLIEST if reset == "earliest" else LATEST)

    # -- reading -----------------------------------------------------------------------

    def poll(
        self, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return records as soon as there are some, none when the time is over.

        Args:
            timeout_ms: an answer that is on its way is waited for all the same, up to
                fetch.max.wait.ms; and joining a group's round is not cut short.
            max_records: max.poll.records if None.

        Raises:
            NoOffsetError, ApiError: see `seek` and the text.
            BrokerUnavailableError: no broker answers; polling again tries again.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        limit = max_records or integer(self._values, "max.poll.records")
        while True:
            self._keep_membership()
            if not self._records and self._assigned:
                self._fetch(deadline)
            found = self._take(limit)
            left_s = deadline - time.monotonic()
            if found or left_s <= 0:
                return found
            if not self._assigned:
                time.sleep(min(left_s, _RETRY_INTERVAL_S))

    def _take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        found: dict[TopicPartition, list[ConsumerRecord]] = {}
        for _ in range(min(limit, len(self._records))):
            record = self._records.popleft()
            where = TopicPartition(record.topic, record.partition)
            found.setdefault(where, []).append(record)
            self._positions[where] = record.offset + 1
        return found

    def _keep_membership(self) -> None:
        member = self._member
        if member is None or not self._topics:
            self._auto_commit()
            return
        member.note_poll()
        if not member.must_join:
            self._auto_commit()
            return
        if self._assigned:
            self._auto_commit(now=True)  # before others go on from there
        self._set_assigned([])
        self._set_assigned(member.join(self._topics))

    def _auto_commit(self, *, now: bool = False) -> None:
        if self._values["enable.auto.commit"] is not True or self._member is None:
            return
        interval_s = integer(self._values, "auto.commit.interval.ms") / 1000
        if not now and time.monotonic() - self._committed_at < interval_s:
            return
        self._committed_at = time.monotonic()
        try:
            if self._positions:
                self._member.commit(self._positions)
        except (RebalancedError, BrokerUnavailableError):
            pass  # what others read again is what at-least-once means

    def _fetch(self, deadline: float) -> None:
        try:
            if self._fetcher is None:
                self._find_positions()
                self._rebuild()
            assert self._fetcher is not None
            for batch in self._fetcher.fetch():
                self._records.extend(_records_of(batch))
        except OffsetOutOfRangeError as error:
            self._positions |= self._reset([error.partition])
            self._rebuild()
        except (LeaderLostError, BrokerUnavailableError):
            self._fetcher = None
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_INTERVAL_S)

    def _rebuild(self) -> None:
        """Fetch from the positions; what is fetched and not returned is dropped."""
        self._records.clear()
        positions = {where: self._positions[where] for where in self._assigned}
        committed = self._values["isolation.level"] == "read_committed"
        # A fetcher's unread answer belongs to its connection: begin with new ones.
        self._cluster.close()
        self._fetcher = RecordFetcher(
            self._cluster,
            positions,
            self._leaders(self._assigned),
            isolation_level=READ_COMMITTED if committed else READ_UNCOMMITTED,
            max_wait_ms=integer(self._values, "fetch.max.wait.ms"),
            max_bytes=integer(self._values, "fetch.max.bytes"),
            partition_max_bytes=integer(self._values, "max.partition.fetch.bytes"),
        )

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Yield records for ever; commits cover those before the one yielded last."""
        while True:
            for records in self.poll(1000, max_records=1).values():
                yield from records

    # -- commits -----------------------------------------------------------------------

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Store positions of the group: those given, or after what poll() returned.

        Raises:
            RebalancedError: nothing is stored: the partitions may be others' by now.
            ConfigError: there is no group.id.
            ApiError: refused.
        """
        member = self._require_member()
        given = self._positions if offsets is None else offsets
        if given:
            member.commit({TopicPartition(*where): at for where, at in given.items()})

    def committed(self, partition: tuple[str, int]) -> int | None:
        """Return the group's stored position; None if it has none."""
        where = TopicPartition(*partition)
        return self._require_member().committed([where]).get(where)

    def close(self) -> None:
        """Commit if that is automatic, leave the group, close connections."""
        self._auto_commit(now=True)
        if self._member is not None:
            self._member.close()
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _records_of(batch: FetchedBatch) -> Iterator[ConsumerRecord]:
    topic, partition = batch.partition
    timestamp_type = batch.header.timestamp_type
    for record in iter_records(batch.data):
        if record.offset >= batch.first_offset:
            offset, timestamp, key, value, headers = record
            yield ConsumerRecord(
                topic,
                partition,
                offset,
                timestamp,
                key,
                value,
                headers,
                timestamp_type,
            )
