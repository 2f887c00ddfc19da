"""ShareMember: a member of a share group, which joins it and sends heartbeats.

`keep` joins in the caller's thread. After that a thread sends the heartbeats, so a
consumer that takes long to use its records stays in the group for up to
max.poll.interval.ms.

Source: KIP-932, "Group membership".
"""

from __future__ import annotations

import threading
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.consumer.coordinator_connection import CoordinatorConnection
from mpbroker.client.errors import check_error, error_code_of
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)

_JOIN_EPOCH: Final = 0
_LEAVE_EPOCH: Final = -1
_JOIN_AGAIN: Final = frozenset(
    {ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH}
)


class ShareGroupSettings(NamedTuple):
    """The settings of a member of a share group."""

    group_id: str
    client_rack: str = ""
    max_poll_interval_ms: int = 300_000


class ShareMember:
    """Joins a share group, and sends the member's heartbeats in a thread.

    Attributes:
        member_id: the id that this object has chosen for its whole life.
        assignment: the assigned partition indexes, by topic id. The mapping is never
            changed, only replaced.
    """

    def __init__(
        self,
        client: ClientSettings,
        settings: ShareGroupSettings,
        on_change: Callable[[], None],
    ) -> None:
        """Prepare the member; `keep` joins the group.

        Args:
            client: the settings of connections.
            settings: the settings of the group's member.
            on_change: called, by any thread, when a heartbeat has changed something
                that the user's thread should see.
        """
        self.member_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        self.assignment: Mapping[bytes, Sequence[int]] = {}
        self._coordinator = CoordinatorConnection(client, settings.group_id)
        self._settings = settings
        self._on_change = on_change
        self._lock = threading.RLock()  # guards what a heartbeat reads and changes
        self._epoch = _JOIN_EPOCH  # the member epoch; _JOIN_EPOCH: this is no member
        self._topics: list[str] = []
        self._told: list[str] = []  # the topics that the coordinator knows
        self._interval_s = 1.0
        self._fatal: MpbrokerError | None = None
        self._last_poll = time.monotonic()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def is_member(self) -> bool:
        return self._epoch != _JOIN_EPOCH

    def subscribe(self, topics: Sequence[str]) -> None:
        """Have the next `keep` tell the group which topics to read."""
        with self._lock:
            self._topics = list(topics)

    def keep(self) -> None:
        """Join the group if necessary, and tell the coordinator of changed topics.

        Raises:
            ApiError: the group refuses this member.
            BrokerUnavailableError: no coordinator answers within request.timeout.ms.
            UnsupportedVersionError: the broker has no share groups.
        """
        self._last_poll = time.monotonic()
        if self._fatal is not None:
            fatal, self._fatal = self._fatal, None  # the next call tries again
            raise fatal
        if self.is_member and self._told == self._topics:
            return
        with self._lock:
            topics = self._topics
            response = self._coordinator.ask(
                self._heartbeat(topics),
                ShareGroupHeartbeatResponse,
                lambda answer: answer.error_code,
            )
            self._take(response, topics)
        if self._heart is None:
            self._heart = threading.Thread(
                target=self._beat,
                name=f"kafka-share-heartbeat-thread | {self._settings.group_id}",
                daemon=True,
            )
            self._heart.start()

    def _heartbeat(self, topics: list[str]) -> ShareGroupHeartbeatRequest:
        joins = not self.is_member
        return ShareGroupHeartbeatRequest(
            group_id=self._settings.group_id,
            member_id=self.member_id,
            member_epoch=self._epoch,
            rack_id=(self._settings.client_rack or None) if joins else None,
            subscribed_topic_names=topics if joins or topics != self._told else None,
        )

    def _take(self, response: ShareGroupHeartbeatResponse, topics: list[str]) -> None:
        code = error_code_of(response.error_code)
        if code in _JOIN_AGAIN:
            self._forget()
            return
        what = f"share group {self._settings.group_id!r}"
        check_error(response.error_code, what, response.error_message)
        self._epoch = response.member_epoch
        self._told = topics
        self._interval_s = max(0.01, response.heartbeat_interval_ms / 1000)
        if response.assignment is not None:
            self.assignment = {
                bytes(topic.topic_id): list(topic.partitions)
                for topic in response.assignment.topic_partitions
            }
            self._on_change()

    def _forget(self) -> None:
        """Note that the group has removed this member, so that it joins again."""
        self._epoch = _JOIN_EPOCH
        self.assignment = {}
        self._on_change()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                with self._lock:
                    if not self.is_member or self._stop.is_set():
                        continue
                    if self._is_idle():
                        self.leave()  # others get the records; poll() joins again
                        continue
                    topics = self._told  # `keep` tells of others
                    response = self._coordinator.ask_once(
                        self._heartbeat(topics), ShareGroupHeartbeatResponse
                    )
                    code = error_code_of(response.error_code)
                    self._coordinator.note(code)
                    if not code.retriable:
                        self._take(response, topics)
            except ApiError as error:
                self._fatal = error
                self._forget()
            except (MpbrokerError, OSError):
                continue  # a later heartbeat, or the user's next poll, may succeed

    def _is_idle(self) -> bool:
        idle_ms = (time.monotonic() - self._last_poll) * 1000
        return idle_ms > self._settings.max_poll_interval_ms

    def leave(self) -> None:
        """Leave the group, if this is a member."""
        with self._lock:
            if not self.is_member:
                return
            request = ShareGroupHeartbeatRequest(
                group_id=self._settings.group_id,
                member_id=self.member_id,
                member_epoch=_LEAVE_EPOCH,
            )
            try:
                self._coordinator.ask_once(request, ShareGroupHeartbeatResponse)
            except MpbrokerError:
                pass  # the coordinator drops it when its session times out
            self._forget()

    def end_by(self, end_s: float) -> None:
        """Let no request wait beyond a time, not even one that waits in the thread.

        Args:
            end_s: the time of the monotonic clock, in seconds.
        """
        self._stop.set()
        self._coordinator.end_by(end_s)

    def close(self) -> None:
        """Leave the group, end the thread, and close the connection."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        self.leave()
        self._coordinator.close()
