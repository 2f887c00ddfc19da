"""Commits that are read by the layout of an earlier one, and by the general decoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator import commit_layout
from mpbroker.coordinator.commit_layout import CommitNumbers, layout_of
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)

VERSIONS = OffsetCommitRequest.valid_versions
EPOCH_SINCE = 6

offsets = st.integers(-(2**63), 2**63 - 1)
epochs = st.integers(-1, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
partitions = st.builds(
    OffsetCommitRequestPartition,
    partition_index=st.integers(0, 300),
    committed_offset=offsets,
    committed_leader_epoch=epochs,
    committed_metadata=st.none() | texts,
)
topics = st.builds(
    OffsetCommitRequestTopic,
    name=texts,
    topic_id=st.binary(min_size=16, max_size=16),
    partitions=st.lists(partitions, max_size=3),
)
requests = st.builds(
    OffsetCommitRequest,
    group_id=texts,
    generation_id_or_member_epoch=st.integers(-1, 9),
    member_id=texts,
    group_instance_id=st.none(),
    retention_time_ms=st.just(-1),
    topics=st.lists(topics, max_size=3),
)
versions = st.integers(VERSIONS.start, VERSIONS.stop - 1)
HEAD = bytes(10)


def parts_of(request: OffsetCommitRequest) -> list[OffsetCommitRequestPartition]:
    return [part for row in request.topics for part in row.partitions]


def numbers_of(request: OffsetCommitRequest) -> tuple[list[int], list[int]]:
    parts = parts_of(request)
    return (
        [part.committed_offset for part in parts],
        [part.committed_leader_epoch for part in parts],
    )


@given(requests, versions, st.data())
def test_other_numbers_are_read_as_by_the_decoder(
    request: OffsetCommitRequest, version: int, data: st.DataObject
) -> None:
    before = request.encode(version)
    layout = layout_of(HEAD + before, request, version)
    assert request.encode(version) == before
    assert layout is not None
    for part in parts_of(request):
        part.committed_offset = data.draw(offsets)
        part.committed_leader_epoch = data.draw(epochs)
    encoded = request.encode(version)
    fixed, read = layout.read(memoryview(HEAD + encoded))
    assert fixed == layout.read(HEAD + before)[0]
    decoded = OffsetCommitRequest.decode(version, encoded)
    assert (list(read.offsets), list(read.leader_epochs)) == numbers_of(decoded)


@given(requests, versions, st.data())
def test_what_has_the_same_fixed_bytes_is_that_request_with_other_numbers(
    request: OffsetCommitRequest, version: int, data: st.DataObject
) -> None:
    """Whatever byte is changed: it is a number's, or one of the fixed bytes."""
    frame = bytearray(HEAD + request.encode(version))
    layout = layout_of(bytes(frame), request, version)
    assert layout is not None
    before, _ = layout.read(bytes(frame))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    fixed, read = layout.read(bytes(frame))
    if fixed != before or 4 <= at < 8:  # in the correlation id
        return
    for part, offset, epoch in zip(
        parts_of(request), read.offsets, read.leader_epochs, strict=True
    ):
        part.committed_offset = offset
        if version >= EPOCH_SINCE:
            part.committed_leader_epoch = epoch
    assert HEAD + request.encode(version) == frame


def test_a_request_that_its_client_encodes_in_another_way_has_no_layout() -> None:
    request = OffsetCommitRequest(group_id="g", topics=[])
    assert layout_of(HEAD + request.encode(9) + b"more", request, 9) is None
    assert layout_of(request.encode(9), request, 9) is None


def test_a_request_that_has_a_mark_s_bytes_has_no_layout() -> None:
    part = OffsetCommitRequestPartition(
        partition_index=0,
        committed_offset=commit_layout._FIRST_MARK,
        committed_metadata="",
    )
    mark = commit_layout._MARK.pack(part.committed_offset)
    topic = OffsetCommitRequestTopic(topic_id=mark + bytes(8), partitions=[part])
    request = OffsetCommitRequest(group_id="g", topics=[topic])
    assert layout_of(HEAD + request.encode(10), request, 10) is None
    topic.topic_id = bytes(16)
    layout = layout_of(HEAD + request.encode(10), request, 10)
    assert layout is not None
    _, read = layout.read(HEAD + request.encode(10))
    assert read == CommitNumbers([part.committed_offset], [-1])
