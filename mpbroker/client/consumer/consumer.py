"""`Consumer`: records from any Kafka broker, alone or as a member of a group.

    with Consumer(bootstrap_servers="localhost:9092", group_id="g") as consumer:
        consumer.subscribe(["events"])
        for record in consumer:
            print(record.partition, record.offset, record.value)

One thread uses a consumer, of the process that made it: a forked child makes its own.
Records come from `poll` (or iteration); only there are partitions given and taken.

Source: the API of Apache Kafka's KafkaConsumer; KIP-429 for cooperative rebalancing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Final, Self

from mpbroker.base.config_def import ConfigError
from mpbroker.client.client_request import NetworkCounts
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer_config import ConsumerSettings
from mpbroker.client.consumer.consumer_metrics import ConsumerMetrics
from mpbroker.client.consumer.consumer_record import ConsumerRecord, records_of
from mpbroker.client.consumer.consumer_telemetry import make_consumer_telemetry
from mpbroker.client.consumer.fetcher import (
    FetchedBatch,
    Fetcher,
    LeaderLostError,
    LogTruncationError,
    NoOffsetError,
    OffsetOutOfRangeError,
)
from mpbroker.client.consumer.group_member import (
    GroupMember,
    RebalancedError,
    RebalanceListener,
)
from mpbroker.client.consumer.offset_lookup import OffsetLookup
from mpbroker.client.consumer.truncation import find_truncations
from mpbroker.client.errors import BrokerUnavailableError, ClientError
from mpbroker.client.ownership import Ownership
from mpbroker.client.selector import monotonic_ms
from mpbroker.protocol.errors import ApiError

_log = logging.getLogger(__name__)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_MISSING_S: Final = 1.0  # before looking again for a topic that is not there

_Partitions = list[TopicPartition]
_Offsets = dict[TopicPartition, int]


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
        self._settings = ConsumerSettings.parse({**(config or {}), **settings})
        client = self._settings.client
        timeout_s = client.request_timeout_ms / 1000
        self._cluster = Cluster(client.bootstrap, timeout_s, client)
        self._lookup = OffsetLookup(self._cluster, self._settings)
        self._metrics = ConsumerMetrics()
        self._member: GroupMember | None = None
        if self._settings.group is not None:
            self._member = GroupMember(
                client, self._settings.group, self._metrics, self._lookup.epochs
            )
        self._telemetry = make_consumer_telemetry(
            self._cluster, self._settings, self._member, lambda: self._measure("/")
        )
        self._topics: list[str] = []
        self._listener = RebalanceListener()
        self._assigned: list[TopicPartition] = []
        self._paused: set[TopicPartition] = set()
        # By partition: the offset after the last record that poll() returned.
        self._positions: dict[TopicPartition, int] = {}
        self._fetcher: Fetcher | None = None
        self._left_out = False  # something assigned is not there; looked for again
        self._look_again_at = 0.0
        self._records: deque[ConsumerRecord] = deque()  # fetched, not returned yet
        self._committed_at = time.monotonic()
        self._in_use: ConsumerRecord | None = None  # yielded by iteration
        self._ownership = Ownership("consumer")

    # -- what is read ------------------------------------------------------------------

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these partitions, instead of what was read before."""
        self._ownership.check()
        self._topics = []
        self._set_assigned([])
        self._set_assigned([TopicPartition(*partition) for partition in partitions])

    def subscribe(
        self, topics: Iterable[str], listener: RebalanceListener | None = None
    ) -> None:
        """Read topics together with the other members of group.id.

        Args:
            topics: instead of those before.
            listener: told what comes and goes.

        Raises:
            ConfigError: there is no group.id.
        """
        if isinstance(topics, str):
            topics = [topics]
        self._ownership.check()
        member = self._require_member()
        if not self._topics:
            self._set_assigned([])
        self._topics = list(dict.fromkeys(topics))
        self._listener = listener or RebalanceListener()
        member.join_again()

    def unsubscribe(self) -> None:
        """Read nothing; leave the group, if one was joined."""
        self._ownership.check()
        if self._topics and self._member is not None:
            self._auto_commit(now=True)
            self._revoke(self._assigned)
            self._member.leave()
        self._topics = []
        self._set_assigned([])

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read now, paused ones included."""
        return list(self._assigned)

    def _set_assigned(self, partitions: list[TopicPartition]) -> None:
        """Read these; those that were read before go on where they are."""
        self._assigned = partitions
        kept = set(partitions)
        self._paused &= kept
        self._lookup.epochs.keep(kept)
        self._positions = {w: at for w, at in self._positions.items() if w in kept}
        self._records = deque(r for r in self._records if (r[0], r[1]) in kept)
        self._fetcher = None
        self._metrics.assigned(partitions)

    def _require_member(self) -> GroupMember:
        if self._member is None:
            raise ConfigError("group.id is not set; groups and commits need one")
        return self._member

    def _check_assigned(self, partition: tuple[str, int]) -> TopicPartition:
        where = TopicPartition(*partition)
        if where not in self._assigned:
            raise ClientError(f"{where} is not assigned; assign or subscribe to it")
        return where

    def _drop_fetched(self, where: TopicPartition) -> None:
        self._records = deque(r for r in self._records if (r[0], r[1]) != where)

    def pause(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Have `poll` return nothing of some partitions; they stay assigned.

        Raises:
            ClientError: one is not assigned.
        """
        for where in [self._check_assigned(partition) for partition in partitions]:
            self._paused.add(where)
            self._drop_fetched(where)
            if self._fetcher is not None:
                self._fetcher.positions.pop(where, None)

    def resume(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Undo `pause`; raises as it does."""
        for where in [self._check_assigned(partition) for partition in partitions]:
            if where in self._paused:
                self._paused.discard(where)
                if self._fetcher is not None and self._fetcher.reads(where):
                    self._fetcher.positions[where] = self._positions[where]

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused."""
        return set(self._paused)

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Go on at an offset of a partition that is read.

        Raises:
            ClientError: it is not assigned.
        """
        where = self._check_assigned(partition)
        self._positions[where] = offset
        self._drop_fetched(where)
        fetcher = None if where in self._paused else self._fetcher
        if fetcher is not None and fetcher.reads(where):
            fetcher.positions[where] = offset

    def seek_to(
        self, timestamp: int, partitions: Iterable[tuple[str, int]] | None = None
    ) -> None:
        """Go to a time in some partitions or all; see `offsets_for`."""
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
        """Return the first offset at or after a time in ms; or one of `admin`'s names.

        A partition that has none is at its end. While one moves, or is new and not
        everywhere yet, it is asked for again, for request.timeout.ms.
        """
        self._ownership.check()
        return self._lookup.offsets_for(partitions, timestamp)

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset that comes next of a partition that is read."""
        where = self._check_assigned(partition)
        if where not in self._positions:
            self._find_positions(self.offsets_for, self._assigned)
        return self._positions[where]

    def _find_positions(
        self, ask: Callable[[_Partitions, int], _Offsets], partitions: _Partitions
    ) -> None:
        missing = [where for where in partitions if where not in self._positions]
        if missing and self._member is not None:
            self._positions |= self._member.committed(missing, goes_there=True)
            missing = [where for where in missing if where not in self._positions]
        if missing:
            self._positions |= ask(missing, self._lookup.reset_time(missing))

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
            NoOffsetError, OffsetOutOfRangeError: auto.offset.reset=none; seek. Of the
                latter is LogTruncationError: what was read is not there any more.
            ApiError: see its text.
            AuthenticationError: a broker does not let us in.
            BrokerUnavailableError: no broker answers; polling again tries again.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        limit = max_records or self._settings.max_poll_records
        self._polled()
        while True:
            self._keep_membership()
            with suppress(LeaderLostError):  # its successor is found at the next turn
                self._decode([] if self._records else self._fetch(deadline))
            found = self._take(limit)
            if found or time.monotonic() >= deadline:
                self._metrics.poll_ended()
                return found

    def _decode(self, batches: list[FetchedBatch]) -> None:
        try:
            for batch in batches:
                self._records.extend(records_of(batch))
                self._metrics.consumed(batch.partition.topic, len(batch.data), 0)
        except BaseException as error:
            # The fetcher is past all of them: begin again behind what is decoded, which
            # comes first. What cannot be decoded then cannot be passed over.
            self._fetcher = None
            if not self._records or not isinstance(error, Exception):
                raise

    def poll_batches(self, timeout_ms: float = 0) -> list[FetchedBatch]:
        """Return what `poll` does in whole batches, which are cheaper than records.

        Positions are after batches then. Raises LeaderLostError too; do not mix both.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        self._polled()
        while True:
            self._keep_membership()
            batches = self._fetch(deadline)
            for where, _, header, data in batches:
                self._metrics.consumed(where.topic, len(data), header.record_count)
            self._note_fetched()
            if batches or time.monotonic() >= deadline:
                self._metrics.poll_ended()
                return batches

    def _take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        found: dict[TopicPartition, list[ConsumerRecord]] = {}
        for _ in range(min(limit, len(self._records))):
            record = self._records.popleft()
            where = TopicPartition(record.topic, record.partition)
            found.setdefault(where, []).append(record)
            self._positions[where] = record.offset + 1
        if not self._records:
            self._note_fetched()
        for where, records in found.items():
            self._metrics.consumed(where.topic, 0, len(records))
        return found

    def _note_fetched(self) -> None:
        # Past what a reader is not shown, too: markers, and what was aborted.
        if self._fetcher is not None:
            self._positions |= self._fetcher.positions

    def _fetch(self, deadline: float) -> list[FetchedBatch]:
        """Return what brokers answer; none after waiting a little, for many reasons."""
        if self._telemetry is not None:
            self._telemetry.step(monotonic_ms())
        try:
            looks = self._left_out and time.monotonic() >= self._look_again_at
            if self._assigned and (looks or self._fetcher is None):
                self._fetcher = self._make_fetcher()
            if self._fetcher is not None and self._fetcher.positions:
                batches = self._fetcher.fetch()
                if self._fetcher.lacks_leader and not self._left_out:
                    self._look_again()
                return batches
        except OffsetOutOfRangeError as error:
            self._go_back(error)
            return []
        except (LeaderLostError, BrokerUnavailableError):
            self._fetcher = None
            if time.monotonic() >= deadline:
                raise
        except ApiError as error:
            self._fetcher = None
            if not error.error_code.retriable:
                raise
            # A leader that has moved, or is new: found at the next turn.
        except BaseException:
            self._fetcher = None  # it may have taken what we were not told of
            raise
        left_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(left_s, _RETRY_INTERVAL_S)))
        return []

    def _go_back(self, lost: OffsetOutOfRangeError) -> None:
        """Go to where a partition can be read, if that may be chosen; else raise."""
        if self._settings.auto_offset_reset == "none":
            self._fetcher = None  # it would read on behind it
            raise lost
        self.seek(lost.partition, self._lookup.offset_after(lost))

    def _look_again(self) -> None:
        self._left_out = True
        self._look_again_at = time.monotonic() + _MISSING_S

    def _prepare(self, partitions: _Partitions) -> dict[TopicPartition, int]:
        self._find_positions(self._lookup.ask_reachable, partitions)
        return self._lookup.leaders(partitions)

    def _make_fetcher(self) -> Fetcher:
        self._left_out = False
        leaders = self._lookup.find_leaders(self._assigned, self._prepare)
        epochs = self._lookup.epochs
        doubts = find_truncations(self._cluster, epochs, leaders, self._positions)
        for where in doubts.open:
            leaders.pop(where, None)
            if self._fetcher is not None:
                self._fetcher.positions.pop(where, None)
        if not leaders.keys() >= set(self._assigned):
            self._look_again()
        for lost in doubts.lost:
            self._go_back(lost)
        positions = {
            where: self._positions[where]
            for where in leaders
            if where not in self._paused
        }
        if self._fetcher is not None:  # what it waits for is not asked for again
            self._fetcher.lead(leaders, positions)
            return self._fetcher
        return Fetcher(
            self._cluster,
            positions,
            leaders,
            self._settings.fetch,
            metrics=self._metrics,
            epochs=epochs,
        )

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Yield records for ever.

        Positions are after the one yielded last; but an error that ends the consumer's
        ``with`` block leaves that one to whoever goes on from what is committed.
        """
        while True:
            for records in self.poll(1000, max_records=1).values():
                for record in records:
                    self._in_use = record
                    yield record
                    self._in_use = None

    # -- the group ---------------------------------------------------------------------

    def _keep_membership(self) -> None:
        member = self._member
        if member is None or not self._topics:
            self._auto_commit()
            return
        member.note_poll()
        member.check_topics()
        if not member.must_join:
            self._auto_commit()
            return
        self._give_up(member)
        while True:
            assigned = member.join(self._topics, self._assigned)
            if assigned is None:
                self._give_up(member)
                continue
            gone = [where for where in self._assigned if where not in assigned]
            new = [where for where in assigned if where not in self._assigned]
            if gone:
                # What this member gives up can be given to others only in a next round.
                member.join_again()
                try:
                    self._auto_commit(now=True)
                    self._revoke(gone)
                except BaseException:
                    # Given up all the same; of what is new the listener hears later.
                    self._set_assigned([w for w in self._assigned if w not in gone])
                    raise
            self._set_assigned(assigned)
            if new or not gone:
                self._listener.on_partitions_assigned(new)
            if not gone:
                return

    def _give_up(self, member: GroupMember) -> None:
        """Stop reading what must not be read during a rebalance."""
        if not self._assigned or (member.is_member and member.is_cooperative):
            return
        try:
            if not member.is_member:
                self._listener.on_partitions_lost(self._assigned)
            else:
                self._auto_commit(now=True)  # before others go on from there
                self._revoke(self._assigned)
        finally:
            self._set_assigned([])  # a listener that raises keeps nobody from joining

    def _revoke(self, partitions: Collection[TopicPartition]) -> None:
        if partitions:
            self._listener.on_partitions_revoked(partitions)

    def _auto_commit(self, *, now: bool = False) -> None:
        if not self._settings.enable_auto_commit or self._member is None:
            return
        interval_s = self._settings.auto_commit_interval_ms / 1000
        if not now and time.monotonic() - self._committed_at < interval_s:
            return
        self._committed_at = time.monotonic()
        try:
            if self._positions:
                self._member.commit(self._positions, as_member=bool(self._topics))
        except (RebalancedError, BrokerUnavailableError):
            pass  # what others read again is what at-least-once means
        except ApiError as error:
            # As Kafka does: nobody asked for it just now, and reading can go on.
            _log.warning("positions are not committed: %s", error)

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Store positions of the group: those given, or after what poll() returned.

        Raises:
            RebalancedError: nothing is stored: the partitions may be others' by now,
                or this consumer, that subscribed, has not joined its group.
            ConfigError: there is no group.id.
            ApiError: refused.
        """
        self._ownership.check()
        member = self._require_member()
        given = self._positions if offsets is None else offsets
        if given:
            offsets = {TopicPartition(*where): at for where, at in given.items()}
            member.commit(offsets, as_member=bool(self._topics))

    def committed(self, partition: tuple[str, int]) -> int | None:
        """Return the group's stored position; None if it has none."""
        self._ownership.check()
        where = TopicPartition(*partition)
        return self._require_member().committed([where]).get(where)

    def _counts(self) -> list[NetworkCounts]:
        counts = [self._cluster.client.counts]
        if self._member is not None:
            counts.append(self._member.network_counts)
        return counts

    def _polled(self) -> None:
        self._ownership.check()
        self._metrics.polled()
        # Rates are of the last minute: what came before must have been seen before.
        self._metrics.network.follow(self._counts(), monotonic_ms())

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return Kafka's, by group: consumer-metrics, consumer-coordinator-metrics,
        consumer-fetch-manager-metrics (also .TOPIC and .TOPIC.PARTITION) and
        consumer-node-metrics.node-N. Any thread may ask.
        """
        return self._measure(".")

    def _measure(self, separator: str) -> dict[str, dict[str, float]]:
        connections = self._cluster.client.connection_count()
        if self._member is not None:
            connections += self._member.connection_count
        self._metrics.network.follow(self._counts(), monotonic_ms(), at_once=True)
        assigned = len(self._assigned)
        groups = self._metrics.snapshot(assigned, self._positions, separator)
        groups["consumer-metrics"]["connection-count"] = float(connections)
        return groups

    def close(self) -> None:
        """Commit if that is automatic, leave the group, close connections.

        Calling it again does nothing, nor does it in a forked child.
        """
        if not self._ownership.close():
            return
        with ExitStack() as stack:
            # Whatever fails before: a member that is still counted keeps others from
            # its partitions, and its thread would have it counted for ever.
            stack.callback(self._cluster.close)
            if self._telemetry is not None:
                stack.callback(self._telemetry.push_last, self._cluster.poll)
            if self._member is not None:
                stack.callback(self._member.close)
            self._auto_commit(now=True)
            if self._topics:
                self._revoke(self._assigned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None and self._in_use is not None:
            # Not done with, as far as anyone knows: whoever goes on begins with it.
            topic, partition, offset = self._in_use[:3]
            where = TopicPartition(topic, partition)
            if self._positions.get(where) == offset + 1:
                self._positions[where] = offset
        self.close()


__all__ = [
    "Consumer",
    "ConsumerRecord",
    "LeaderLostError",
    "LogTruncationError",
    "NoOffsetError",
    "OffsetOutOfRangeError",
    "RebalanceListener",
    "RebalancedError",
]
