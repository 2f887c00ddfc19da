"""Metadata: the brokers, topics and leaders that a client knows, and when it asks anew.

The thread that runs the `NetworkClient` sends the requests. Any thread may read the
snapshot, request an update, or wait for one. A snapshot never changes once it is made.

Source: Kafka protocol guide, "Metadata"; KIP-320 for leader epochs, KIP-951 for
leaders learnt from the response to a Produce.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.backoff import Backoff
from mpbroker.client.errors import AuthenticationError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)

NO_NODE: Final = -1
_NO_TOPIC_ID: Final = bytes(16)


class TopicInfo(NamedTuple):
    """A topic's id, and the leaders of its partitions.

    Attributes:
        leaders: the node id of each partition's leader; NO_NODE while there is none.
        epochs: the epoch of each partition's leader; -1 if it is not known.
        topic_id: the topic's id, which differs from that of a deleted topic of the same
            name; 16 zero bytes from old brokers.
    """

    leaders: tuple[int, ...]
    epochs: tuple[int, ...]
    topic_id: bytes = _NO_TOPIC_ID


class Snapshot(NamedTuple):
    """The cluster as one Metadata response described it."""

    nodes: Mapping[int, Address]
    topics: Mapping[str, TopicInfo]
    topic_errors: Mapping[str, int]
    controller_id: int = NO_NODE
    cluster_id: str | None = None

    def leader(self, topic: str, partition: int) -> int:
        """Return the node id of a partition's leader, or NO_NODE."""
        info = self.topics.get(topic)
        if info is None or partition >= len(info.leaders):
            return NO_NODE
        return info.leaders[partition]

    def leader_epoch(self, topic: str, partition: int) -> int:
        """Return the epoch of a partition's leader; -1 if that is not known."""
        info = self.topics.get(topic)
        if info is None or partition >= len(info.epochs):
            return -1
        return info.epochs[partition]


_EMPTY: Final = Snapshot({}, {}, {})
_DEFAULT_BACKOFF: Final = Backoff(100, 1000)


class Metadata:
    """Stores the newest metadata, and says when to request it again.

    Times are in ms of one monotonic clock.

    Attributes:
        snapshot: the newest metadata.
        updated_ms: the time at which it came.
        refusal: the error of a login or certificate that was refused; None again when
            metadata comes. Connections are tried again meanwhile.
    """

    def __init__(
        self,
        *,
        max_age_ms: float = 300_000,
        topic_max_idle_ms: float | None = None,
        backoff: Backoff = _DEFAULT_BACKOFF,
        allow_auto_topic_creation: bool = True,
        rng: random.Random | None = None,
    ) -> None:
        """Begin without metadata; an update is due at once.

        Args:
            max_age_ms: the age after which metadata is asked for again.
            topic_max_idle_ms: the time after which a topic that was not used is
                forgotten; None: never.
            backoff: the wait after a request that failed.
            allow_auto_topic_creation: whether a request may create a topic.
            rng: makes the jitter of the backoff.
        """
        self.snapshot = _EMPTY
        self.allow_auto_topic_creation = allow_auto_topic_creation
        self.updated_ms = -float("inf")
        self._max_age_ms = max_age_ms
        self._topic_max_idle_ms = topic_max_idle_ms
        self._backoff = backoff
        self._rng = rng or random.Random()
        self._topics: dict[str, float] = {}
        self._wanted = True
        self._requests = 0  # calls of `request_update`
        self._asked = 0  # how many of these the request in flight will serve
        self._not_before_ms = -float("inf")
        self._failures = 0
        self._due_since_ms: float | None = None
        self._fatal: MpbrokerError | None = None
        self.refusal: AuthenticationError | None = None
        # Always lock `_lock` itself. A Condition is locked by Python code; a signal
        # handler that raises in it would leave the lock locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._updates = 0

    @property
    def topics(self) -> list[str]:
        """The names of the topics that Metadata requests ask about."""
        return list(self._topics)

    def add_topic(self, name: str, now_ms: float) -> None:
        """Ask for a topic's metadata from now on; at once if the topic is new."""
        with self._lock:
            new = name not in self._topics
            self._topics[name] = now_ms
            if new:
                self._wanted = True
                if not self._failures:
                    self._not_before_ms = now_ms  # a caller waits for it

    def request_update(self) -> int:
        """Ask for newer metadata; return the number of updates so far, for `wait`."""
        with self._lock:
            self._wanted = True
            self._requests += 1
            return self._updates

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait for metadata after update number ``seen``; return False if it is late.

        Raises:
            AuthenticationError: a login or a certificate was refused.
            MpbrokerError: the error that `fail` has stored.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._updates <= seen:
                if self._fatal is not None:
                    raise self._fatal.with_traceback(None)
                if self.refusal is not None:
                    raise self.refusal.with_traceback(None)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._updates > seen
            return True

    def delay_ms(self, now_ms: float) -> float:
        """Return how long to wait for the next Metadata request, in ms; 0: send it."""
        due_ms = now_ms if self._wanted else self.updated_ms + self._max_age_ms
        return max(0.0, due_ms - now_ms, self._not_before_ms - now_ms)

    def is_overdue(self, now_ms: float, limit_ms: float) -> bool:
        """Return whether an update has been due for longer than a limit in ms.

        The time counts from the first call that finds an update due.
        """
        if self._due_since_ms is None:
            if self.delay_ms(now_ms) <= 0:
                self._due_since_ms = now_ms
            return False
        return now_ms - self._due_since_ms > limit_ms

    def next_request(self, now_ms: float) -> MetadataRequest:
        """Return the Metadata request to send, for all updates asked for so far."""
        with self._lock:
            if self._topic_max_idle_ms is not None:
                oldest = now_ms - self._topic_max_idle_ms
                self._topics = {
                    name: used for name, used in self._topics.items() if used >= oldest
                }
            self._asked = self._requests
            names = list(self._topics)
        return MetadataRequest(
            topics=[MetadataRequestTopic(name=name) for name in names],
            allow_auto_topic_creation=self.allow_auto_topic_creation,
        )

    def update(self, response: MetadataResponse, now_ms: float) -> None:
        """Store what a Metadata response says, and wake threads that wait for it."""
        asked_errors = False
        topics, errors = {}, {}
        for topic in response.topics:
            name = topic.name or ""
            if topic.error_code:
                errors[name] = topic.error_code
                asked_errors = True
                continue
            topics[name] = info = self._merge(name, topic)
            asked_errors |= NO_NODE in info.leaders
        nodes = {
            node.node_id: Address(node.host, node.port) for node in response.brokers
        }
        with self._lock:
            if not nodes:
                # A broker that is still starting: its answer is of no use.
                self._note_failure(now_ms)
                return
            self.snapshot = Snapshot(
                nodes, topics, errors, response.controller_id, response.cluster_id
            )
            self.updated_ms = now_ms
            self.refusal = None
            self._due_since_ms = None
            self._updates += 1
            missing = self._topics.keys() - topics.keys() - errors.keys()
            self._wanted = asked_errors or bool(missing) or self._requests > self._asked
            if asked_errors:
                self._note_failure(now_ms)
            else:
                self._failures = 0
                self._not_before_ms = now_ms + self._backoff.initial_ms
                if missing:
                    self._not_before_ms = now_ms
            self._changed.notify_all()

    def _merge(self, name: str, topic: MetadataResponseTopic) -> TopicInfo:
        count = max((entry.partition_index for entry in topic.partitions), default=-1)
        count = min(count + 1, len(topic.partitions))  # a broker leaves no gaps
        leaders, epochs = [NO_NODE] * count, [-1] * count
        old = self.snapshot
        known_info = old.topics.get(name)
        topic_id = topic.topic_id
        if known_info is not None and topic_id == _NO_TOPIC_ID:
            topic_id = known_info.topic_id  # an older broker does not tell the id
        # A topic that was deleted and created again begins again with its epochs.
        is_same = known_info is not None and known_info.topic_id == topic_id
        for entry in topic.partitions:
            index = entry.partition_index
            if not 0 <= index < count:
                continue
            leader, epoch = entry.leader_id, entry.leader_epoch
            known = old.leader_epoch(name, index)
            if is_same and 0 <= epoch < known:
                # This broker does not know yet of the leader that we know.
                leader, epoch = old.leader(name, index), known
            elif entry.error_code == ErrorCode.LEADER_NOT_AVAILABLE:
                leader = NO_NODE
            leaders[index], epochs[index] = leader, epoch
        return TopicInfo(tuple(leaders), tuple(epochs), topic_id)

    def update_leader(
        self, topic: str, partition: int, leader: int, epoch: int, address: Address
    ) -> bool:
        """Store a leader from the response to a Produce, if it is newer than the known.

        Returns:
            Whether it is newer.
        """
        with self._lock:
            old = self.snapshot
            info = old.topics.get(topic)
            if info is None or partition >= len(info.leaders):
                return False
            if epoch <= info.epochs[partition]:
                return False
            leaders, epochs = list(info.leaders), list(info.epochs)
            leaders[partition], epochs[partition] = leader, epoch
            changed = info._replace(leaders=tuple(leaders), epochs=tuple(epochs))
            self.snapshot = old._replace(
                nodes={**old.nodes, leader: address},
                topics={**old.topics, topic: changed},
            )
            return True

    def fail_update(self, now_ms: float) -> None:
        """Note that a Metadata request got no response, and begin the backoff."""
        with self._lock:
            self._wanted = True
            self._note_failure(now_ms)

    def forget_nodes(self) -> None:
        """Forget all brokers, so that the bootstrap addresses are used again.

        Topics and leaders stay as they are.
        """
        with self._lock:
            self.snapshot = self.snapshot._replace(nodes={})
            self._due_since_ms = None
            self._wanted = True

    def fail(self, error: MpbrokerError) -> None:
        """Store an error that no retry can mend; `wait` raises it from now on."""
        with self._lock:
            self._fatal = error
            self._changed.notify_all()

    def refuse(self, error: AuthenticationError) -> None:
        """Store the error of a refused login or certificate.

        `wait` raises it until metadata comes.
        """
        with self._lock:
            self.refusal = error
            self._changed.notify_all()

    def _note_failure(self, now_ms: float) -> None:
        delay = self._backoff.delay_ms(self._failures, self._rng)
        self._not_before_ms = now_ms + delay
        self._failures += 1
