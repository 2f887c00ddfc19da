"""RemoteManifest: the list of one partition's segments in the remote store.

Kafka keeps these facts in the topic `__remote_log_metadata`, which needs replicas to
survive a machine. Here each partition has one object, replaced as a whole, and a copy
of it in the partition's directory, which handlers and the housekeeper read:

    owner                                  the cluster and broker that write here
    <topic id>/<partition>/manifest        the manifest
    <topic id>/<partition>/<base>-<id>.log        a segment's records, as in Kafka
    <topic id>/<partition>/<base>-<id>.indexes    its other files (see SegmentIndexes)

Only one process writes manifests. A key is never used twice: ``id`` is random. So an
object is never replaced by another one, and a manifest that is older than the objects
beside it never refers to wrong bytes.

    states of a segment         its objects
    COPYING                     may exist, whole or in part, or not
    COPIED                      exist and were compared with the local files
    DELETING                    may exist or not

A segment is entered as COPYING before its objects are written, and as DELETING before
they are removed. So the objects that a killed process has left are all named in a
manifest, and no listing of the store is needed to remove them.

Source: KIP-405 (RemoteLogSegmentState).
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgpack

from mpbroker.base.storage_errors import StorageError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.log_files import REMOTE_MANIFEST_FILE

_VERSION: Final = 1
_CRC_BYTES: Final = 4
# A read from the store brings so many bytes of a segment, which are checked together.
CHUNK_BYTES: Final = 4 * 1024 * 1024


class ManifestError(StorageError):
    """A manifest or a segment's indexes are damaged, or of a newer version.

    A manifest is the list of a partition's segments in the remote store.
    """


class SegmentState(IntEnum):
    """The state of a segment in the remote store; only COPIED ones can be read."""

    COPYING = 1
    COPIED = 2
    DELETING = 3


class RemoteSegment(NamedTuple):
    """One segment of a partition in the remote store.

    Attributes:
        base_offset: the segment's base offset.
        next_base: the base offset of the next segment.
        segment_id: 32 hex digits, new for each copy.
        state: a SegmentState.
        size: bytes of the segment's `.log`.
        largest_timestamp: the largest timestamp in ms, as retention uses it.
        indexes_size: bytes of the object that has the segment's other files.
        indexes_crc: CRC-32C of that object.
        has_aborted: whether the segment has markers of aborted transactions.
    """

    base_offset: int
    next_base: int
    segment_id: str
    state: int
    size: int
    largest_timestamp: int
    indexes_size: int = 0
    indexes_crc: int = 0
    has_aborted: bool = False


class RemoteManifest(NamedTuple):
    """The list of a partition's segments in the remote store, by ascending offsets.

    Attributes:
        topic: the topic's name, for people and for a restore.
        segments: all segments, in any state.
        generation: a number that grows with each manifest that is written.
        prefix: the prefix of the keys of the partition's objects.
    """

    topic: str = ""
    segments: tuple[RemoteSegment, ...] = ()
    generation: int = 0
    prefix: str = ""

    def copied(self) -> list[RemoteSegment]:
        """Return the segments that can be read from the store."""
        return [s for s in self.segments if s.state == SegmentState.COPIED]

    def unfinished(self) -> list[RemoteSegment]:
        """Return the segments whose objects in the store are to be removed."""
        return [s for s in self.segments if s.state != SegmentState.COPIED]

    def copied_to(self) -> int:
        """Return the offset behind the last segment in the store; -1: there is none."""
        copied = self.copied()
        return copied[-1].next_base if copied else -1

    def with_segment(self, segment: RemoteSegment) -> RemoteManifest:
        """Return a copy of this list with a segment added, or replaced by its id."""
        others = self.without({segment.segment_id}).segments
        return self._replace(segments=tuple(sorted((*others, segment))))

    def without(self, segment_ids: set[str]) -> RemoteManifest:
        """Return a copy of this list of segments without those of these ids."""
        left = (s for s in self.segments if s.segment_id not in segment_ids)
        return self._replace(segments=tuple(left))

    @classmethod
    def of_directory(cls, directory: str) -> RemoteManifest:
        """Read the list of remote segments from the file in a partition's directory.

        If there is no file, the list is empty.

        Raises:
            ManifestError: the file is damaged.
            OSError: the file cannot be read.
        """
        try:
            with open(f"{directory}/{REMOTE_MANIFEST_FILE}", "rb") as file:
                return cls.decode(file.read())
        except FileNotFoundError:
            return cls()

    def encode(self) -> bytes:
        """Encode this list of segments, with a CRC-32C of all bytes in front."""
        rows = [tuple(segment) for segment in self.segments]
        fields = [_VERSION, self.topic, rows, self.generation, self.prefix]
        return seal(msgpack.packb(fields))

    @classmethod
    def decode(cls, content: bytes, expected: str = "") -> RemoteManifest:
        """Return the manifest in bytes that ``encode`` has made.

        Args:
            content: the bytes.
            expected: the prefix of the keys of the partition that they were read for;
                "": any partition.

        Raises:
            ManifestError: they are damaged, or of another partition, or a newer
                mpbroker has written them.
        """
        found = msgpack.unpackb(unseal(content, "a manifest"))
        if found[0] != _VERSION:
            raise ManifestError(f"a manifest of version {found[0]}, not {_VERSION}")
        _, topic, rows, generation, prefix = found
        if expected and prefix != expected:
            raise ManifestError(f"a manifest of {prefix}, not of {expected}")
        segments = tuple(RemoteSegment(*row) for row in rows)
        return cls(topic, segments, generation, prefix)


class SegmentIndexes(NamedTuple):
    """All files of a segment except its `.log`, as one object in the store.

    Attributes:
        chunks: the CRC-32C of each chunk of 4 MiB of the `.log`.
        files: content by suffix: `.index`, `.timeindex`, `.txnindex` if there is one,
            and `.snapshot`, the producers' state as of the segment's end, if there is
            one.
        leader_epochs: the content of the partition's leader-epoch-checkpoint.
    """

    chunks: tuple[int, ...]
    files: dict[str, bytes]
    leader_epochs: bytes

    def encode(self) -> bytes:
        """Encode these files as one object, with a CRC-32C of all bytes in front."""
        fields = [_VERSION, self.chunks, self.files, self.leader_epochs]
        return seal(msgpack.packb(fields))

    @classmethod
    def decode(cls, content: bytes) -> SegmentIndexes:
        """Return the files in the bytes that ``encode`` has made.

        Raises:
            ManifestError: they are damaged, or a newer mpbroker has written them.
        """
        found = msgpack.unpackb(unseal(content, "a segment's indexes"))
        if found[0] != _VERSION:
            raise ManifestError(f"a segment's indexes of version {found[0]}")
        return cls(tuple(found[1]), found[2], found[3])


def floor(segments: list[RemoteSegment], offset: int) -> int:
    """Return the number of the last segment that begins at or below an offset.

    Args:
        segments: the segments, by ascending offsets.
        offset: the offset.

    Returns:
        The number, from 0; -1: there is no such segment.
    """
    return bisect_right(segments, offset, key=lambda each: each.base_offset) - 1


def seal(content: bytes) -> bytes:
    """Return ``content`` with its CRC-32C (4 bytes, big-endian) put before it."""
    return crc32c(content).to_bytes(_CRC_BYTES, "big") + content


def unseal(content: bytes, what: str) -> Any:
    """Check the CRC-32C at the beginning of an object; return the bytes behind it.

    Args:
        content: the bytes that ``seal`` has made.
        what: the object's name in the error.

    Raises:
        ManifestError: the bytes have another CRC-32C, or there are none.
    """
    body = content[_CRC_BYTES:]
    if crc32c(body) != int.from_bytes(content[:_CRC_BYTES], "big") or not body:
        raise ManifestError(f"{what} of {len(content)} bytes is damaged")
    return body


def partition_prefix(topic_id: bytes, partition: int) -> str:
    """Return the prefix of the keys of a partition's objects in the store."""
    return f"{topic_id.hex()}/{partition}"


def manifest_key(prefix: str) -> str:
    """Return the key of a partition's manifest: the list of its remote segments."""
    return f"{prefix}/manifest"


def log_key(prefix: str, segment: RemoteSegment) -> str:
    """Return the key of the object that has a segment's `.log` file."""
    return f"{prefix}/{segment.base_offset:020d}-{segment.segment_id}.log"


def indexes_key(prefix: str, segment: RemoteSegment) -> str:
    """Return the key of the object that has a segment's files other than `.log`."""
    return f"{prefix}/{segment.base_offset:020d}-{segment.segment_id}.indexes"
