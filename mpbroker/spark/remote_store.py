"""Find the closed segments in a broker's remote store (tiered storage).

    owner                                       the broker that writes here
    metadata/index                              where logs begin, among other things
    <topic id>/<partition>/manifest             the segments of a partition
    <topic id>/<partition>/<base>-<id>.log      a segment's records, as in Kafka
    <topic id>/<partition>/<base>-<id>.indexes  its indexes and its producer snapshot

Objects are written once and never replaced, except manifests and metadata/index. Those
two and `.indexes` begin with the CRC-32C of the rest, which is MessagePack.

Source: the broker's storage/remote/remote_manifest.py and metadata_copy.py. Code of
clients, such as this module, does not import them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgpack
import pyarrow as pa
from pyarrow import fs

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.spark.segment_directory import (
    LOG,
    SNAPSHOT,
    PartitionFiles,
    Segment,
    SegmentError,
    read_file,
)

_VERSION: Final = 1
_COPIED: Final = 2
_CRC_BYTES: Final = 4
_ID_DIGITS: Final = 32
_INDEXES: Final = ".indexes"
# Requests in flight while a query is planned: there is a manifest for each partition.
_REQUESTS: Final = 32


class Manifest(NamedTuple):
    """The copied segments of one partition.

    Attributes:
        topic_id: the topic's id, as 32 hex digits.
        generation: a number that grows with each manifest that the broker writes, for
            whichever partition.
        here: the copied segments.
    """

    topic_id: str
    generation: int
    here: RemotePartitionFiles


class RemotePartitionFiles(PartitionFiles):
    """The segments of one partition in a remote store; all of them are closed."""

    def __init__(self, partition: TopicPartition, files: fs.FileSystem) -> None:
        super().__init__(partition, files)
        self._last: tuple[str, Mapping[str, bytes]] = "", {}

    def beside(self, segment: Segment, suffix: str) -> bytes | None:
        """Return an index or the producer snapshot of a segment; None if there is none.

        Args:
            suffix: the file's suffix, such as ".index".

        Raises:
            SegmentError: the object is damaged, or gone.
        """
        path, found = self._last
        if path != segment.path:
            crc = segment.indexes_crc
            found = read_indexes(self.files, segment.path, crc or 0)
            self._last = segment.path, found
        return found.get(suffix)

    def snapshots(self) -> Iterator[tuple[int, bytes]]:
        """Yield the end offset of the last segment, and its producer snapshot.

        Yield nothing if the segment has no snapshot.
        """
        last = self.segments[-1]
        content = self.beside(last, SNAPSHOT)
        if content is not None and last.end is not None:
            yield last.end, content


def is_remote_store(files: fs.FileSystem, root: str) -> bool:
    """Return whether a directory is a remote store, which has a file ``owner``."""
    found = files.get_file_info(f"{root}/owner")
    return bool(found.type == fs.FileType.File)


def list_remote_partitions(
    files: fs.FileSystem, root: str, topic_ids: Mapping[str, str] | None = None
) -> dict[TopicPartition, PartitionFiles]:
    """Return the copied segments of each partition, as the manifests list them.

    Args:
        files: the store.
        root: the broker's directory in the store.
        topic_ids: the ids (32 hex digits) of the topics to return, by name. None:
            return all topics; of topics with the same name, the one written last.

    Raises:
        SegmentError: a manifest is damaged, or of a newer version.
        OSError: the store cannot be read.
    """
    ids = [each for each in _children(files, root) if _is_id(each)]
    if topic_ids is not None:
        ids = [each for each in ids if each in set(topic_ids.values())]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        starts = pool.submit(_log_starts, files, root)
        numbers = pool.map(lambda each: _children(files, f"{root}/{each}"), ids)
        places = [
            (topic_id, number)
            for topic_id, found in zip(ids, numbers, strict=True)
            for number in found
            if number.isdecimal()
        ]
        read = pool.map(lambda place: _read_manifest(files, root, *place), places)
        manifests = [each for each in read if each is not None]
    newest: dict[str, tuple[int, str]] = {}
    for each in manifests:
        topic = each.here.partition.topic
        written = each.generation, each.topic_id
        newest[topic] = max(newest.get(topic, written), written)
    known = starts.result()
    found = {}
    for each in manifests:
        partition = each.here.partition
        if each.here.segments and newest[partition.topic][1] == each.topic_id:
            start = known.get((each.topic_id, partition.partition), 0)
            each.here.log_start_offset = start
            found[partition] = each.here
    return dict(sorted(found.items()))


def read_indexes(files: fs.FileSystem, log_path: str, crc: int) -> Mapping[str, bytes]:
    """Return a segment's indexes and producer snapshot, by the suffix of each file.

    Args:
        files: the store.
        log_path: the path of the segment's `.log` object.
        crc: the CRC-32C that the manifest (the list of segments) gives for the
            `.indexes` object.

    Raises:
        SegmentError: the object is damaged, or gone.
    """
    path = log_path.removesuffix(LOG) + _INDEXES
    try:
        content = read_file(files, path)
    except FileNotFoundError:
        raise SegmentError(
            f"{path} is gone (retention?); run the query again"
        ) from None
    if crc32c(content) != crc:
        raise SegmentError(f"{path} has other bytes than were written")
    _, _, found, _ = _unsealed(content, path)
    return {str(suffix): bytes(each) for suffix, each in found.items()}


def _read_manifest(
    files: fs.FileSystem, root: str, topic_id: str, number: str
) -> Manifest | None:
    """Return the list of a partition's segments in the store (its manifest).

    None: the topic was deleted meanwhile.
    """
    prefix = f"{root}/{topic_id}/{number}"
    try:
        content = read_file(files, f"{prefix}/manifest")
    except FileNotFoundError:
        return None
    _, topic, rows, generation, _ = _unsealed(content, f"{prefix}/manifest")
    partition = TopicPartition(topic, int(number))
    here = RemotePartitionFiles(partition, files)
    for base, following, segment_id, state, size, latest, _, crc, aborted in rows:
        if state == _COPIED:
            here.segments.append(
                Segment(
                    partition,
                    f"{prefix}/{base:020d}-{segment_id}{LOG}",
                    base,
                    following,
                    size,
                    largest_timestamp=latest,
                    has_aborted=aborted,
                    indexes_crc=crc,
                )
            )
    return Manifest(topic_id, generation, here)


def _log_starts(files: fs.FileSystem, root: str) -> dict[tuple[str, int], int]:
    """Return the log start offsets that the broker has copied to the store.

    They are by topic id and partition.
    """
    path = f"{root}/metadata/index"
    try:
        content = read_file(files, path)
    except FileNotFoundError:
        return {}  # the broker has just begun
    ends = _unsealed(content, path)[-1]
    return {(topic_id.hex(), number): start for topic_id, number, start, _ in ends}


def _unsealed(content: bytes, path: str) -> list[Any]:
    body = content[_CRC_BYTES:]
    if not body or crc32c(body) != int.from_bytes(content[:_CRC_BYTES], "big"):
        raise SegmentError(f"{path} is damaged: its checksum is another one")
    found: list[Any] = msgpack.unpackb(body)
    if found[0] != _VERSION:
        raise SegmentError(f"{path} was written by a newer mpbroker: update this one")
    return found


def _children(files: fs.FileSystem, path: str) -> list[str]:
    """Return the names of the directories in a directory."""
    try:
        found = files.get_file_info(fs.FileSelector(path))
    except FileNotFoundError:
        return []  # a topic that was deleted meanwhile
    except pa.ArrowInvalid as error:
        raise SegmentError(f"{path}: {error}") from error
    return sorted(each.base_name for each in found if not each.is_file)


def _is_id(name: str) -> bool:
    return len(name) == _ID_DIGITS and all(each in "0123456789abcdef" for each in name)
