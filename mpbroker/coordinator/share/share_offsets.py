"""Serve admin clients' requests about the start offsets of share groups.

Source: KIP-932; Kafka's GroupCoordinatorService (describe-, alter- and
deleteShareGroupOffsets).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mpbroker.coordinator.context import Topics
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.offset_answers import each_group_once
from mpbroker.coordinator.groups.share_group import ShareGroup
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.coordinator.share.share_service import ShareReader
from mpbroker.coordinator.share.share_states import UNINITIALIZED, ShareStates
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import describe_share_group_offsets as describe_messages
from mpbroker.protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    AlterShareGroupOffsetsResponsePartition,
    AlterShareGroupOffsetsResponseTopic,
)
from mpbroker.protocol.messages.delete_share_group_offsets import (
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsResponseTopic,
)
from mpbroker.protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsResponseGroup,
    DescribeShareGroupOffsetsResponsePartition,
    DescribeShareGroupOffsetsResponseTopic,
)

_NO_TOPIC_ID: Final = bytes(16)
_NO_LAG: Final = -1
_UNKNOWN: Final = "This server does not host this topic-partition."


class ShareOffsets:
    """Describes, alters and deletes the start offsets of share groups."""

    def __init__(
        self,
        outbox: Outbox,
        topics: Topics,
        groups: GroupCoordinator,
        states: ShareStates,
        reader: ShareReader,
    ) -> None:
        self._out = outbox
        self._topics = topics
        self._groups = groups
        self._states = states
        self._reader = reader

    def describe_share_group_offsets(
        self, call: Call, request: DescribeShareGroupOffsetsRequest, now_ms: int
    ) -> None:
        groups = []
        after: set[int] = set()
        for asked in each_group_once(request.groups):
            row = DescribeShareGroupOffsetsResponseGroup(
                group_id=asked.group_id, topics=[]
            )
            try:
                self._groups.check_group(asked.group_id)
                self._groups.share_group(asked.group_id)
                row.topics = self._describe(call, asked, after)
            except ApiError as error:
                row.error_code = error.error_code
                row.error_message = error.message or None
            groups.append(row)
        # Wait for the disk: a power cut must not take back an offset that a client has
        # seen.
        answer = DescribeShareGroupOffsetsResponse(groups=groups)
        self._out.answer(call, answer, tuple(after))

    def _describe(
        self,
        call: Call,
        asked: describe_messages.DescribeShareGroupOffsetsRequestGroup,
        after: set[int],
    ) -> list[DescribeShareGroupOffsetsResponseTopic]:
        wanted: dict[str, list[int]] = {}
        if asked.topics is None:
            for key in sorted(self._states.keys_of(asked.group_id)):
                name = self._topics.topic_name(key.topic_id)
                if name is not None and _may(call, AclOperation.DESCRIBE, name):
                    wanted.setdefault(name, []).append(key.partition)
        else:
            for topic in asked.topics:
                wanted.setdefault(topic.topic_name, []).extend(topic.partitions)
        found = []
        for name, partitions in wanted.items():
            numbers = dict.fromkeys(partitions)  # each once
            topic_id = self._topics.topic_id(name)
            if not _may(call, AclOperation.DESCRIBE, name):
                code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                rows = [_refused(number, code) for number in numbers]
            else:
                rows = [
                    self._describe_partition(asked.group_id, topic_id, number, after)
                    for number in numbers
                ]
            found.append(
                DescribeShareGroupOffsetsResponseTopic(
                    topic_name=name, topic_id=topic_id or _NO_TOPIC_ID, partitions=rows
                )
            )
        return found

    def _describe_partition(
        self, group_id: str, topic_id: bytes | None, partition: int, after: set[int]
    ) -> DescribeShareGroupOffsetsResponsePartition:
        row = DescribeShareGroupOffsetsResponsePartition(
            partition_index=partition, start_offset=UNINITIALIZED, lag=_NO_LAG
        )
        if topic_id is None:
            return row
        key = ShareKey(group_id, topic_id, partition)
        try:
            state = self._states.get(key)
            if state is not None and state.share is not None:
                share = state.share
                _, end = self._reader.offsets(topic_id, partition)
                row.start_offset = share.start_offset
                row.lag = max(0, end - share.start_offset - share.finished_count)
                after.add(self._states.log_of(key))
        except ApiError as error:
            row.error_code = error.error_code
            row.error_message = error.message or None
        return row

    def alter_share_group_offsets(
        self, call: Call, request: AlterShareGroupOffsetsRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self._groups.check_group(group_id)
            group = self._empty_group(group_id, now_ms)
        except ApiError as error:
            self._out.answer(
                call,
                AlterShareGroupOffsetsResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )
            return
        after: set[int] = set()
        responses = []
        for topic in request.topics:
            name, topic_id = topic.topic_name, self._topics.topic_id(topic.topic_name)
            rows = []
            for row in topic.partitions:
                code = ErrorCode.NONE
                number = row.partition_index
                if not _may(call, AclOperation.READ, name):
                    code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                elif topic_id is None or not self._reader.has_partition(
                    topic_id, number
                ):
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                else:
                    key = ShareKey(group_id, topic_id, number)
                    try:
                        self._states.get(key)
                    except ApiError as error:
                        code = error.error_code
                    else:
                        epoch = group.group_epoch
                        self._states.begin(key, row.start_offset, epoch, now_ms)
                        group.initialized.setdefault(topic_id, (name, set()))[1].add(
                            number
                        )
                        after.add(self._states.log_of(key))
                rows.append(
                    AlterShareGroupOffsetsResponsePartition(
                        partition_index=number, error_code=code
                    )
                )
            responses.append(
                AlterShareGroupOffsetsResponseTopic(
                    topic_name=name, topic_id=topic_id or _NO_TOPIC_ID, partitions=rows
                )
            )
        after.update(self._groups.begin_share_epoch(group))
        answer = AlterShareGroupOffsetsResponse(responses=responses)
        self._out.answer(call, answer, tuple(after))

    def delete_share_group_offsets(
        self, call: Call, request: DeleteShareGroupOffsetsRequest, now_ms: int
    ) -> None:
        group_id = request.group_id
        try:
            self._groups.check_group(group_id)
            group = self._empty_group(group_id, None)
        except ApiError as error:
            self._out.answer(
                call,
                DeleteShareGroupOffsetsResponse(
                    error_code=error.error_code, error_message=error.message or None
                ),
            )
            return
        after: set[int] = set()
        responses = []
        for topic in request.topics:
            name, topic_id = topic.topic_name, self._topics.topic_id(topic.topic_name)
            code, message = ErrorCode.NONE, None
            if not _may(call, AclOperation.READ, name):
                code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            elif topic_id is None:
                code, message = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, _UNKNOWN
            else:
                after.update(self._delete(group, topic_id))
            responses.append(
                DeleteShareGroupOffsetsResponseTopic(
                    topic_name=name,
                    topic_id=topic_id or _NO_TOPIC_ID,
                    error_code=code,
                    error_message=message,
                )
            )
        after.update(self._groups.write_share_topics(group))
        answer = DeleteShareGroupOffsetsResponse(responses=responses)
        self._out.answer(call, answer, tuple(after))

    def _delete(self, group: ShareGroup, topic_id: bytes) -> Iterable[int]:
        group.initialized.pop(topic_id, None)
        for key in self._states.keys_of(group.group_id):
            if key.topic_id == topic_id:
                self._states.delete(key)
                yield self._states.log_of(key)

    def delete_states(self, group_id: str) -> tuple[int, ...]:
        """Delete all share states of a group that is deleted.

        Returns:
            The numbers of the logs that get the tombstones. The answer to the deletion
            waits for these logs.
        """
        logs = set()
        for key in self._states.keys_of(group_id):
            self._states.delete(key)
            logs.add(self._states.log_of(key))
        return tuple(logs)

    def _empty_group(self, group_id: str, now_ms: int | None) -> ShareGroup:
        """Return a share group, which must have no members.

        Args:
            now_ms: the time, if a group that does not exist may be created; None: it
                may not.

        Raises:
            ApiError: GROUP_ID_NOT_FOUND: the group does not exist; NON_EMPTY_GROUP: it
                has members.
        """
        group = self._groups.share_group(group_id, may_make=now_ms is not None)
        if not group.is_empty:
            raise ApiError(
                ErrorCode.NON_EMPTY_GROUP, f"The group {group_id} is not empty."
            )
        return group


def _may(call: Call, operation: AclOperation, name: str) -> bool:
    return call.access is None or call.access.may_topic(operation, name)


def _refused(
    partition: int, code: ErrorCode
) -> DescribeShareGroupOffsetsResponsePartition:
    return DescribeShareGroupOffsetsResponsePartition(
        partition_index=partition,
        start_offset=UNINITIALIZED,
        lag=_NO_LAG,
        error_code=code,
    )
