"""`Consumer` reads records from any Kafka broker, alone or as a member of a group.

    with Consumer(bootstrap_servers="localhost:9092", group_id="g") as consumer:
        consumer.subscribe(["events"])
        for record in consumer:
            print(record.partition, record.offset, record.value)

One thread uses a consumer, in the process that made it; a forked child makes its own.
Another thread, or a signal handler, may only call `wakeup`.
Records come from `poll` or from iteration. A rebalance changes the assigned partitions,
and calls the `RebalanceListener`, only during these calls.

Source: the API of Apache Kafka's KafkaConsumer; KIP-429 for cooperative rebalancing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Final, Self

from mpbroker.base.config_def import ConfigError
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST
from mpbroker.client.backoff import hurry_if_interrupted
from mpbroker.client.client_request import NetworkCounts
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.code_settings import CONSUMER_CODE, take_code
from mpbroker.client.consumer.async_commits import AsyncCommits, CommitCallback
from mpbroker.client.consumer.consumer_config import ConsumerSettings
from mpbroker.client.consumer.consumer_group_member import ConsumerGroupMember
from mpbroker.client.consumer.consumer_metrics import ConsumerMetrics
from mpbroker.client.consumer.consumer_record import (
    ConsumerRecord,
    Deserializers,
    FetchedRecords,
    RecordDeserializationError,
)
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
    CONSUMER,
    GroupMember,
    RebalancedError,
    RebalanceListener,
)
from mpbroker.client.consumer.offset_lookup import OffsetLookup
from mpbroker.client.consumer.truncation import find_truncations
from mpbroker.client.errors import BrokerUnavailableError, ClientError, WakeupError
from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.client.ownership import Ownership
from mpbroker.client.selector import monotonic_ms
from mpbroker.client.serialization import Deserializer, load_deserializer
from mpbroker.client.settings import settings_together
from mpbroker.protocol.errors import ApiError

_log = logging.getLogger(__name__)


_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
_MISSING_S: Final = 1.0  # before looking again for a topic that does not exist
# Iteration polls so often while there are fetched records. A poll takes longer than all
# the rest; but it sees to the group, and to commits.
_POLL_INTERVAL_S: Final = 0.01

CLOSE_S: Final = 30.0  # of Java's KafkaConsumer.close()

_Partitions = list[TopicPartition]
_Offsets = dict[TopicPartition, int]


class Consumer:
    """Reads records, alone or as a member of a group.

    One thread uses a consumer; any thread may call `wakeup`.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_deserializer: Deserializer | str | None = None,
        value_deserializer: Deserializer | str | None = None,
        **settings: object,
    ) -> None:
        """Make a consumer; it connects when a call needs a broker.

        Args:
            config: Kafka's settings by name, with dots or underscores.
            key_deserializer: a function that returns a key, given the topic and the
                key's bytes, or its name; see `mpbroker.client.serialization`. None:
                keys are bytes.
            value_deserializer: the same for values.
            settings: more settings like those of ``config``, as keyword arguments.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        given, code = take_code(
            settings_together(config, settings),
            dict(
                zip(CONSUMER_CODE, (key_deserializer, value_deserializer), strict=True)
            ),
        )
        deserializers = Deserializers(
            *(
                load_deserializer(key, code[key]) if key in code else None
                for key in CONSUMER_CODE
            )
        )
        self._settings = ConsumerSettings.parse(given)
        client = self._settings.client
        timeout_s = client.request_timeout_ms / 1000
        self._cluster = Cluster(client.bootstrap, timeout_s, client)
        self._lookup = OffsetLookup(self._cluster, self._settings)
        self._metrics = ConsumerMetrics()
        self._member: GroupMember | None = None
        if self._settings.group is not None:
            kind = GroupMember
            if self._settings.group.group_protocol == CONSUMER:
                kind = ConsumerGroupMember
            self._member = kind(
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
        # Whether an assigned partition cannot be read now, and when (by the monotonic
        # clock, in s) to look for its leader again.
        self._left_out = False
        self._look_again_at = 0.0
        self._fetched = FetchedRecords(deserializers)  # and not returned yet
        self._committed_at = time.monotonic()
        self._in_use: ConsumerRecord | None = None  # the record that iteration yielded
        self._async_commits = AsyncCommits()
        self._is_woken = False
        self._ownership = Ownership("consumer")

    # -- partitions and positions ------------------------------------------------------

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these partitions, and no others, without a group's assignment."""
        self._ownership.check()
        self._topics = []
        self._set_assigned([])
        self._set_assigned([TopicPartition(*partition) for partition in partitions])

    def subscribe(
        self, topics: Iterable[str], listener: RebalanceListener | None = None
    ) -> None:
        """Read topics together with the other members of the group.

        Args:
            topics: the topics to read, instead of those before.
            listener: called when partitions are assigned or taken away.

        Raises:
            ConfigError: group.id is not set.
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
        """Stop reading, and leave the group, if this consumer is a member."""
        self._ownership.check()
        if self._topics and self._member is not None:
            self._auto_commit(now=True)
            self._revoke(self._assigned)
            self._member.leave()
        self._topics = []
        self._set_assigned([])

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, including paused ones."""
        return list(self._assigned)

    def _set_assigned(self, partitions: list[TopicPartition]) -> None:
        """Change the assignment; partitions that stay keep their positions."""
        self._assigned = partitions
        kept = set(partitions)
        self._paused &= kept
        self._lookup.epochs.keep(kept)
        self._positions = {w: at for w, at in self._positions.items() if w in kept}
        self._fetched.keep(kept.__contains__)
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
        self._fetched.keep(where.__ne__)

    def pause(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Have `poll` return no records of some partitions, which stay assigned.

        Raises:
            ClientError: a partition is not assigned.
        """
        for where in [self._check_assigned(partition) for partition in partitions]:
            self._paused.add(where)
            self._drop_fetched(where)
            if self._fetcher is not None:
                self._fetcher.positions.pop(where, None)

    def resume(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Have `poll` return records of paused partitions again.

        Raises:
            ClientError: a partition is not assigned.
        """
        for where in [self._check_assigned(partition) for partition in partitions]:
            if where in self._paused:
                self._paused.discard(where)
                if self._fetcher is not None and self._fetcher.reads(where):
                    self._fetcher.positions[where] = self._positions[where]

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused."""
        return set(self._paused)

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Have `poll` go on at an offset of an assigned partition.

        Raises:
            ClientError: the partition is not assigned.
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
        """Have `poll` go on at a time, in some assigned partitions or in all.

        Args:
            timestamp: the time in ms since 1970; or EARLIEST, LATEST or MAX_TIMESTAMP.
            partitions: the partitions; None means all that are assigned.
        """
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
        """Return the first offset at or after a time, for each partition.

        Brokers are asked again, for up to request.timeout.ms, while a partition is new
        or changes its leader.

        Args:
            partitions: the partitions, which need not be assigned.
            timestamp: the time in ms since 1970; or EARLIEST, LATEST or MAX_TIMESTAMP.

        Returns:
            The offsets, by partition. For a partition that has no record that late, it
            is the offset after its last record.
        """
        self._ownership.check()
        return self._lookup.offsets_for(partitions, timestamp)

    def beginning_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        """Return the first offset of each partition, as `offsets_for` does."""
        return self.offsets_for(partitions, EARLIEST)

    def end_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        """Return the offset after the last record of each partition.

        With isolation.level=read_committed, it is the offset of the first transaction
        that is not decided yet, if there is one.
        """
        return self.offsets_for(partitions, LATEST)

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset of the next record of an assigned partition.

        Raises:
            ClientError: the partition is not assigned.
        """
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
        """Return records by partition, as soon as there are some.

        Args:
            timeout_ms: return without records after this time. It may take longer: up
                to fetch.max.wait.ms for a request in flight, and as long as the group
                takes to rebalance.
            max_records: the most records to return; None: max.poll.records.

        Raises:
            NoOffsetError: a partition has no position, and auto.offset.reset=none:
                seek.
            OffsetOutOfRangeError: a position does not exist, and
                auto.offset.reset=none: seek. LogTruncationError, a subclass: records
                that were read are lost.
            RecordDeserializationError: a deserializer refused a record: seek.
            WakeupError: `wakeup` was called.
            ApiError: a broker refused; the text says why.
            AuthenticationError: a login or a certificate was refused.
            BrokerUnavailableError: no broker answers; the next poll tries again.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        limit = max_records or self._settings.max_poll_records
        self._polled()
        while True:
            self._keep_membership()
            with suppress(LeaderLostError):  # the next turn finds the new leader
                if not self._fetched:
                    self._add(self._fetch(deadline))
            found = self._take(limit)
            if not found:
                self._check_woken()
            if found or time.monotonic() >= deadline:
                self._metrics.poll_ended()
                return found

    def _add(self, batches: list[FetchedBatch]) -> None:
        for batch in batches:
            self._metrics.consumed(batch.partition.topic, len(batch.data), 0)
        self._fetched.add(batches)

    def poll_batches(self, timeout_ms: float = 0) -> list[FetchedBatch]:
        """Return whole batches, which are cheaper than the records of `poll`.

        Positions are then after whole batches. Use one of the two for a consumer.

        Raises:
            LeaderLostError: a leader has changed; call again.
            WakeupError: `wakeup` was called.
            NoOffsetError, OffsetOutOfRangeError, ApiError, AuthenticationError,
                BrokerUnavailableError: see `poll`.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        self._polled()
        while True:
            self._keep_membership()
            batches = self._fetch(deadline)
            for where, _, header, data in batches:
                self._metrics.consumed(where.topic, len(data), header.record_count)
            self._note_fetched()
            if not batches:
                self._check_woken()
            if batches or time.monotonic() >= deadline:
                self._metrics.poll_ended()
                return batches

    def _take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        try:
            found = self._fetched.take(limit)
        except Exception:
            raise
        except BaseException:
            # An interrupt: some records may be taken, but not returned. A new fetcher
            # begins after those that were returned.
            self._fetched.keep(lambda _: False)
            self._fetcher = None
            raise
        for where, records in found.items():
            self._positions[where] = records[-1].offset + 1
            self._metrics.consumed(where.topic, 0, len(records))
        if not self._fetched:
            self._note_fetched()
        return found

    def _note_fetched(self) -> None:
        # Positions pass records that are not returned, too: markers and aborted ones.
        if self._fetcher is not None:
            self._positions |= self._fetcher.positions

    def _fetch(self, deadline: float) -> list[FetchedBatch]:
        """Fetch batches; after an error that may pass, pause and return no batches."""
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
            # The leader has changed, or is new: the next turn finds it.
        except BaseException:
            self._fetcher = None  # it may have passed batches that we did not get
            raise
        left_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(left_s, _RETRY_INTERVAL_S)))
        return []

    def _go_back(self, lost: OffsetOutOfRangeError) -> None:
        """Seek to an offset that exists; raise if auto.offset.reset is none."""
        if self._settings.auto_offset_reset == "none":
            self._fetcher = None  # it would skip the lost records
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
        if self._fetcher is not None:  # keep its requests in flight
            self._fetcher.lead(leaders, positions)
            return self._fetcher
        fetcher = Fetcher(
            self._cluster,
            positions,
            leaders,
            self._settings.fetch,
            metrics=self._metrics,
            epochs=epochs,
        )
        fetcher.is_woken = lambda: self._is_woken
        return fetcher

    def wakeup(self) -> None:
        """Have `poll` raise `WakeupError`: the one that waits now, or the next one.

        Any thread may call this, and so may a signal handler. Records that were fetched
        are not lost. While the group rebalances, poll() is woken after that.
        """
        self._is_woken = True
        self._cluster.client.wakeup()

    def forget_wakeup(self) -> None:
        """Take back a call of `wakeup` that has not ended a poll yet."""
        self._is_woken = False

    def _check_woken(self) -> None:
        if self._is_woken:
            self._is_woken = False
            raise WakeupError("poll() was ended by wakeup()")

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Yield records for ever.

        Positions are after the record that was yielded last. But if an exception ends
        the consumer's ``with`` block, they are before it: the next consumer of the
        group gets that record again.
        """
        while True:
            for records in self.poll(1000, max_records=1).values():
                for record in records:
                    self._in_use = record
                    yield record
                    self._in_use = None
            yield from self._in_hand()

    def _in_hand(self) -> Iterator[ConsumerRecord]:
        """Yield records that were fetched, until a poll may have more to do."""
        end = time.monotonic() + _POLL_INTERVAL_S
        counts: dict[str, int] = {}
        try:
            while not self._is_woken and time.monotonic() < end:
                self._ownership.check()
                found = self._fetched.take_one()
                if found is None:
                    break
                where, record = found
                self._positions[where] = record.offset + 1
                if not self._fetched:
                    self._note_fetched()
                counts[where.topic] = counts.get(where.topic, 0) + 1
                self._in_use = record
                yield record
                self._in_use = None
        finally:
            for topic, count in counts.items():
                self._metrics.consumed(topic, 0, count)

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
                # The partitions given up here are assigned in the next generation.
                member.join_again()
                try:
                    self._auto_commit(now=True)
                    self._revoke(gone)
                except BaseException:
                    # They are given up all the same. The next poll tells the listener
                    # of new ones.
                    self._set_assigned([w for w in self._assigned if w not in gone])
                    raise
            self._set_assigned(assigned)
            if new or (member.has_rounds and not gone):
                self._listener.on_partitions_assigned(new)
            if not gone:
                return

    def _give_up(self, member: GroupMember) -> None:
        """Revoke all partitions before a rebalance, unless it is a cooperative one.

        If the group has already removed this member, report them as lost.
        """
        if not self._assigned or (member.is_member and member.is_cooperative):
            return
        try:
            if not member.is_member:
                self._listener.on_partitions_lost(self._assigned)
            else:
                self._auto_commit(now=True)  # others go on from these offsets
                self._revoke(self._assigned)
        finally:
            self._set_assigned([])  # even if the listener raises

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
        self._async_commits.wait()
        try:
            if self._positions:
                self._member.commit(self._positions, as_member=bool(self._topics))
        except (RebalancedError, BrokerUnavailableError):
            pass  # others read some records again: delivery is at least once
        except ApiError as error:
            # As in Kafka: the user did not call commit(), and reading can go on.
            _log.warning("offsets are not committed: %s", error)

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit offsets for the group.

        Args:
            offsets: the offset of the next record to read, by partition; None commits
                the offsets after the records that poll() returned.

        Raises:
            RebalancedError: nothing is committed. Other members may have the partitions
                by now, or this consumer has subscribed but not joined its group yet.
            ConfigError: group.id is not set.
            ApiError: the coordinator refused.
        """
        self._ownership.check()
        member = self._require_member()
        self._async_commits.wait()
        if given := self._to_commit(offsets):
            member.commit(given, as_member=bool(self._topics))

    def _to_commit(
        self, offsets: Mapping[TopicPartition, int] | None
    ) -> dict[TopicPartition, int]:
        given = self._positions if offsets is None else offsets
        return {TopicPartition(*where): at for where, at in given.items()}

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int] | None = None,
        callback: CommitCallback | None = None,
    ) -> None:
        """Commit offsets for the group without waiting for the coordinator.

        Commits stay in the order of the calls; `commit` and `close` wait for them.

        Args:
            offsets: see `commit`.
            callback: called with the offsets and an error or None, by a later call of
                `poll`, `commit` or `close`; at once if there are no offsets to commit.
                None: an error is logged.

        Raises:
            RebalancedError, ConfigError: see `commit`.
        """
        self._ownership.check()
        member = self._require_member()
        self._async_commits.deliver()
        given = self._to_commit(offsets)
        request = member.commit_request(given, as_member=bool(self._topics))
        if given:
            send = partial(member.send_commit, request)
            self._async_commits.add(send, given, callback)
        elif callback is not None:
            callback(given, None)

    def group_metadata(self) -> GroupMetadata:
        """Return the group's id and this member's, for a producer's transaction.

        `Producer.send_offsets_to_transaction` takes them. So a member that was replaced
        cannot commit with a transaction.

        Raises:
            ConfigError: group.id is not set.
        """
        return self._require_member().metadata

    def committed(self, partition: tuple[str, int]) -> int | None:
        """Return the group's committed offset of a partition; None if it has none."""
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
        self._async_commits.deliver()
        self._metrics.polled()
        # Rates are over the last minute, so take the counts of each poll in time.
        self._metrics.network.follow(self._counts(), monotonic_ms())

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics by Kafka's names, in groups; any thread may call.

        The groups are consumer-metrics, consumer-coordinator-metrics,
        consumer-fetch-manager-metrics (also with .TOPIC and .TOPIC.PARTITION) and
        consumer-node-metrics.node-N.
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

    def close(self, timeout: float = CLOSE_S) -> None:
        """Commit if enable.auto.commit is true; leave the group; close all connections.

        A second call does nothing, and neither does a call in a forked child. After a
        KeyboardInterrupt meanwhile nothing is waited for any more.

        Args:
            timeout: the longest wait for brokers, in seconds, for all of this together.
                A commit waits for some seconds only if no broker can be reached.
        """
        if not self._ownership.close():
            return
        self._end_by(time.monotonic() + timeout)
        hurry = hurry_if_interrupted(self._end_by)
        with ExitStack() as stack:
            # Leave the group whatever fails before. The heartbeats of a member that has
            # not left would keep its partitions from others for ever.
            stack.callback(self._cluster.close)
            if self._telemetry is not None and timeout > 0:
                stack.callback(self._telemetry.push_last, self._cluster.poll)
            if self._member is not None:
                stack.push(hurry)
                stack.callback(self._member.close)
            stack.push(hurry)
            stack.callback(self._async_commits.close)
            stack.push(hurry)
            self._auto_commit(now=True)
            if self._topics:
                self._revoke(self._assigned)

    def _end_by(self, end_s: float) -> None:
        self._cluster.end_by(end_s)
        if self._member is not None:
            self._member.end_by(end_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None and self._in_use is not None:
            # The user may not be done with this record: do not commit it.
            topic, partition, offset = self._in_use[:3]
            where = TopicPartition(topic, partition)
            if self._positions.get(where) == offset + 1:
                self._positions[where] = offset
        self.close()


__all__ = [
    "Consumer",
    "ConsumerRecord",
    "Deserializer",
    "LeaderLostError",
    "LogTruncationError",
    "NoOffsetError",
    "OffsetOutOfRangeError",
    "RebalanceListener",
    "RebalancedError",
    "RecordDeserializationError",
]
