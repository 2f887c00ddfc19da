"""Compare the objects of a remote store with the manifests that name them.

A broker may run meanwhile. It names an object in a manifest before it writes the
object, and removes the object before it removes the name. So the objects are listed
first, and the manifests are read after that: an object that no manifest names then will
never be named, since each copy of a segment has a new id. If an object seems to be
missing, its manifest is read once more, because the broker may have removed the segment
since.

The pieces below `metadata/` are the exception: the index names them after they were
written. Pieces without a name are left to the broker, which removes them when it
starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mpbroker.base.storage_errors import RemoteObjectMissingError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.remote.metadata_copy import (
    INDEX_KEY,
    METADATA_PREFIX,
    MetadataIndex,
)
from mpbroker.storage.remote.remote_manifest import (
    CHUNK_BYTES,
    ManifestError,
    RemoteManifest,
    RemoteSegment,
    SegmentIndexes,
    indexes_key,
    log_key,
    manifest_key,
    partition_prefix,
)

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore

_PARTS_OF_KEY = 3  # topic id, partition, object


class Findings(NamedTuple):
    """The result of a check.

    Attributes:
        segments: the number of segments that the manifests call copied.
        damage: a line of text for each object that is missing or damaged, or has
            another size.
        orphans: the keys of objects that no manifest names.
    """

    segments: int
    damage: tuple[str, ...]
    orphans: tuple[str, ...]


def check(store: ObjectStore, *, contents: bool = False) -> Findings:
    """Compare the objects of a store with its manifests; change nothing.

    Args:
        store: the store.
        contents: read all copied segments, and compare their checksums, too.

    Raises:
        RemoteStorageError: the store cannot be read.
    """
    by_prefix: dict[str, list[str]] = {}
    for key in store.list(""):
        parts = key.split("/")
        if len(parts) == _PARTS_OF_KEY:
            by_prefix.setdefault("/".join(parts[:2]), []).append(key)
    segments = 0
    damage: list[str] = []
    orphans: list[str] = []
    living = _living(store)
    for prefix, keys in sorted(by_prefix.items()):
        try:
            manifest = RemoteManifest.decode(store.get(manifest_key(prefix)), prefix)
        except RemoteObjectMissingError:
            manifest = RemoteManifest(prefix=prefix)  # its topic was deleted, or else:
            left = _still_there(store, keys)
            if left and (living is None or prefix in living):
                damage.append(
                    f"{manifest_key(prefix)} is missing, which names {len(left)}"
                    " objects: start the broker again, which has a copy of it"
                )
                continue
        except ManifestError as error:
            damage.append(f"{manifest_key(prefix)}: {error}")
            continue
        segments += len(manifest.copied())
        damage += _missing(store, prefix, manifest, contents=contents)
        named = {manifest_key(prefix)}
        for segment in manifest.segments:
            named |= {log_key(prefix, segment), indexes_key(prefix, segment)}
        orphans += _still_there(store, sorted(set(keys) - named))
    damage += _missing_metadata(store)
    return Findings(segments, tuple(damage), tuple(orphans))


def _living(store: ObjectStore) -> set[str] | None:
    """Return the prefixes of the partitions that had remote storage lately.

    If the manifest of one of them is missing, its objects are not left over.

    Returns:
        None if this is not known, as there is no copy of the metadata.
    """
    try:
        ends = MetadataIndex.decode(store.get(INDEX_KEY)).ends
    except (RemoteObjectMissingError, ManifestError):
        return None
    return {partition_prefix(end.topic_id, end.partition) for end in ends}


def _missing(
    store: ObjectStore, prefix: str, manifest: RemoteManifest, *, contents: bool
) -> Iterator[str]:
    """Yield a line about each object of a copied segment that is missing or damaged."""
    for segment in manifest.copied():
        wrong = _sizes(store, prefix, segment)
        if contents and not wrong:
            try:
                wrong = _other_bytes(store, prefix, segment)
            except RemoteObjectMissingError:  # since its size was told
                wrong = _sizes(store, prefix, segment)
        if wrong and _was_removed(store, prefix, segment.segment_id):
            continue
        partition = prefix.rpartition("/")[2]
        for what in wrong:
            yield (
                f"{manifest.topic}-{partition}, offsets {segment.base_offset} to"
                f" {segment.next_base - 1}: {what}"
            )


def _sizes(store: ObjectStore, prefix: str, segment: RemoteSegment) -> list[str]:
    """Say which objects of a segment are missing, or have another size."""
    wrong = []
    for key, size in (
        (log_key(prefix, segment), segment.size),
        (indexes_key(prefix, segment), segment.indexes_size),
    ):
        found = _size(store, key)
        if found != size:
            what = "is missing" if found < 0 else f"has {found} bytes, not {size}"
            wrong.append(f"{key} {what}")
    return wrong


def _other_bytes(store: ObjectStore, prefix: str, segment: RemoteSegment) -> list[str]:
    """Read a segment, 4 MiB at a time; say where it is not as it was written.

    Raises:
        RemoteObjectMissingError: an object is not there any more.
        RemoteStorageError: the store cannot be read.
    """
    key = indexes_key(prefix, segment)
    content = store.get(key, segment.indexes_size)
    if crc32c(content) != segment.indexes_crc:
        return [f"{key} has other bytes than were written"]
    key = log_key(prefix, segment)
    for number, crc in enumerate(SegmentIndexes.decode(content).chunks):
        place = number * CHUNK_BYTES
        if crc32c(store.get_range(key, place, CHUNK_BYTES)) != crc:
            return [f"{key} has other bytes than were written, from byte {place} on"]
    return []


def _was_removed(store: ObjectStore, prefix: str, segment_id: str) -> bool:
    """Return whether a broker has removed a segment since its manifest was read."""
    try:
        manifest = RemoteManifest.decode(store.get(manifest_key(prefix)), prefix)
    except RemoteObjectMissingError:
        return True
    return all(each.segment_id != segment_id for each in manifest.copied())


def _missing_metadata(store: ObjectStore) -> list[str]:
    """Return a line about each object of the metadata that is missing or damaged."""
    while True:
        try:
            content = store.get(INDEX_KEY)
        except RemoteObjectMissingError:
            return ["there is no copy of the metadata: mpbroker restore cannot work"]
        try:
            keys = MetadataIndex.decode(content).keys()
        except ManifestError as error:
            return [f"{INDEX_KEY}: {error}"]
        there = set(store.list(METADATA_PREFIX))
        missing = [
            f"{key} is missing: mpbroker restore cannot work"
            for key in sorted(keys - there)
        ]
        # A newer copy may have replaced this one since, and its pieces were deleted.
        if not missing or store.get(INDEX_KEY) == content:
            return missing


def _still_there(store: ObjectStore, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if _size(store, key) >= 0]


def _size(store: ObjectStore, key: str) -> int:
    try:
        return store.size(key)
    except RemoteObjectMissingError:
        return -1
