"""RemotePartition: copy a partition's closed segments to the store, and remove them.

A segment is copied in these steps. If the process is killed between any two of them,
the next pass goes on as the right column says:

    1. the manifest says COPYING            the objects under that id are removed, now
                                            and again a while later
    2. the `.log` object is written         the same
    3. the `.indexes` object is written     the same
    4. the manifest says COPIED             the segment is copied

A segment is removed in these steps: the manifest says DELETING, the objects are
deleted, the manifest forgets the segment. Only one process copies and removes, and no
key is used twice.

A request whose answer did not come may take effect late, after the objects of its copy
were removed. So a segment that is COPYING is forgotten when its objects were removed a
second time, some minutes later. The objects of a deleted topic, its manifest among
them, are removed twice, too.

Each manifest is written to the store first, then to the partition's directory, where
other processes read it. Only the removal of copies of local segments has the other
order, because of retention (see ``_mark_copies``). The manifest with the higher
generation counts: a PUT whose answer was lost may take effect late.

Source: KIP-405; Kafka's RemoteLogManager (RLMCopyTask, RLMExpirationTask).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.storage_errors import (
    CorruptLogError,
    RemoteObjectMissingError,
    RemoteStorageError,
    StorageError,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.batch_scan import scan_valid_batches
from mpbroker.storage.files.leader_epochs import FILE_NAME as LEADER_EPOCHS
from mpbroker.storage.files.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    REMOTE_MANIFEST_FILE,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    base_offsets,
    file_size,
    remove_if_exists,
    segment_file,
    write_file,
)
from mpbroker.storage.partition_directory import exclusive, read_topic_id
from mpbroker.storage.remote.remote_manifest import (
    CHUNK_BYTES,
    RemoteManifest,
    RemoteSegment,
    SegmentIndexes,
    SegmentState,
    indexes_key,
    log_key,
    manifest_key,
    partition_prefix,
)

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore
    from mpbroker.storage.remote.remote_plan import PartitionPlan

_DELETE_AT_ONCE: Final = 100  # segments between two manifests
_TURN_BYTES: Final = 256 * 1024 * 1024  # one segment may be larger
# Above the time after which a request to the store is given up.
LATE_S: Final = 120.0


class RemotePartition:
    """One partition's segments in the store, for the one process that changes them.

    Args:
        store: the store, which this broker owns.
        topic: the topic's name.
        topic_id: the topic's id, 16 bytes.
        partition: the partition number.
        directory: the partition's directory; "": there is no directory any more.
        fence: raises NotOwnerError if the store belongs to another broker by now.
        throttle: called with the size of each chunk before it is sent; may sleep.
        late_s: the time in seconds within which a request may still take effect after
            it was given up.

    Attributes:
        lag: the sizes in bytes of the segments that are to be copied, as of the last
            pass.
        stored: the number of segments in the store, and the bytes of their `.log`
            files.
    """

    def __init__(
        self,
        store: ObjectStore,
        topic: str,
        topic_id: bytes,
        partition: int,
        directory: str = "",
        fence: Callable[[], None] = lambda: None,
        throttle: Callable[[int], object] = int,
        late_s: float = LATE_S,
    ) -> None:
        self._late_s = late_s
        # By segment id of a copy that was given up, the time (monotonic, in seconds) of
        # the first removal of its objects.
        self._given_up: dict[str, float] = {}
        # When the objects of a deleted topic are removed again; -1: they never were.
        self._gone_at = -1.0
        self._store = store
        self._throttle = throttle
        self._fence = fence
        self._prefix = partition_prefix(topic_id, partition)
        self._topic_id = topic_id
        self._topic = topic
        self._directory = directory
        self._manifest: RemoteManifest | None = None
        self.lag: list[int] = []
        self.stored = (0, 0)

    def run(self, plan: PartitionPlan, copied: Callable[[int], object] = int) -> None:
        """Remove unfinished and old segments from the store, and copy new ones to it.

        Old segments are those below the log start offset. If the plan is older than the
        topic's deletion, and its directory is another topic's by now, nothing is done.
        After 256 MiB it is another partition's turn: then ``lag`` has the rest.

        Args:
            plan: the housekeeper's plan for this partition.
            copied: called with the size in bytes of each segment that was copied.

        Raises:
            MpbrokerError: the store failed, or files are damaged; the next pass goes
                on.
            OSError: the local files cannot be read or written.
        """
        self._directory = plan.directory
        if read_topic_id(plan.directory) != self._topic_id:
            self.lag = []
            return
        try:
            self._remove_unfinished()
            if plan.remove_all:
                self._remove_all(plan.log_start_offset)
            else:
                self._remove_below(plan.log_start_offset)
                candidates = self.measure(plan)
                self._require_same_log(plan.directory)
                sent = 0
                for base, following in candidates:
                    if sent >= _TURN_BYTES:
                        break
                    size = self._copy(base, following)
                    copied(size)
                    sent += size
                    self.lag.pop(0)
            left = self._manifest or RemoteManifest()
            sizes = [segment.size for segment in left.copied()]
            self.stored = len(sizes), sum(sizes)
        except (MpbrokerError, OSError):
            # The store may have the last manifest, or the one before it: read it again.
            self._manifest = None
            raise

    def measure(self, plan: PartitionPlan) -> list[tuple[int, int]]:
        """Find the segments that are to be copied to the store; note their sizes.

        This does not ask the store, so it works while the store is away.

        Returns:
            The first and the next base offset of each segment that is to be copied.

        Raises:
            ManifestError: the manifest in the directory is damaged.
            OSError: the local files cannot be read.
        """
        if read_topic_id(plan.directory) != self._topic_id:
            self.lag = []
            return []
        manifest = self._manifest or self._read_local(plan.directory)
        candidates = list(_candidates(plan, manifest.copied_to()))
        self.lag = [
            file_size(segment_file(plan.directory, base, LOG_SUFFIX))
            for base, _ in candidates
        ]
        return candidates

    def remove(self) -> bool:
        """Remove all objects of the partition, whose topic was deleted.

        If it fails, it may be called again.

        Returns:
            Whether all is done. False: a request that was given up may still make
            objects, so the caller calls again later. All is done with the first call
            that comes ``late_s`` after the first removal.

        Raises:
            MpbrokerError: the store failed.
        """
        now = time.monotonic()
        if now < self._gone_at:
            return False
        self._directory = ""
        manifest = self.manifest
        self._fence()
        for first in range(0, len(manifest.segments), _DELETE_AT_ONCE):
            self._delete(manifest.segments[first : first + _DELETE_AT_ONCE])
        is_first = self._gone_at < 0
        late = [s for s in manifest.segments if s.state == SegmentState.COPYING]
        if is_first and late:
            if len(late) < len(manifest.segments):
                self._save(manifest._replace(segments=tuple(late)))
        else:
            # Last: it names the others.
            self._store.delete([manifest_key(self._prefix)])
            self._manifest = None
        if is_first:
            self._gone_at = now + self._late_s
        return not is_first

    @property
    def manifest(self) -> RemoteManifest:
        """The partition's manifest: the list of its segments in the store.

        It is read from the store and the partition's directory at the first use.

        The one of the higher generation counts, and is written to the other place.

        Raises:
            MpbrokerError: it cannot be read from the store, or is damaged.
        """
        if self._manifest is None:
            remote = self._read_remote()
            local = self._read_local(self._directory)
            newest = max(remote, local, key=lambda each: each.generation)
            if remote.generation < newest.generation:
                self._save(newest)
            elif local.generation < newest.generation:
                self._save_local(newest)
            self._manifest = newest
        return self._manifest

    def _read_remote(self) -> RemoteManifest:
        try:
            content = self._store.get(manifest_key(self._prefix))
        except RemoteObjectMissingError:
            return RemoteManifest(self._topic, prefix=self._prefix)
        return RemoteManifest.decode(content, self._prefix)

    def _read_local(self, directory: str) -> RemoteManifest:
        """Read the manifest in a directory; that of another partition does not count.

        An earlier mpbroker could leave a deleted topic's to a new topic of its name.
        """
        if not directory:
            return RemoteManifest()
        local = RemoteManifest.of_directory(directory)
        if local.prefix in ("", self._prefix):
            return local
        return RemoteManifest(generation=-1)  # below all others, so it is replaced

    def _save(self, manifest: RemoteManifest) -> None:
        manifest = _following(manifest)
        self._fence()
        self._store.put(manifest_key(self._prefix), manifest.encode())
        self._save_local(manifest)
        self._manifest = manifest

    def _save_local(self, manifest: RemoteManifest) -> None:
        if not self._directory:
            return
        directory = os.open(
            self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            # By the descriptor: the topic may be deleted meanwhile, and another one of
            # its name may get the path.
            held = f"/proc/self/fd/{directory}"
            if read_topic_id(held) != self._topic_id:
                raise StorageError(f"{self._directory} is another topic's by now")
            write_file(f"{held}/{REMOTE_MANIFEST_FILE}", manifest.encode())
        finally:
            os.close(directory)

    # -- removal -----------------------------------------------------------------------

    def _remove_unfinished(self) -> None:
        """Remove the objects of copies that were given up, and of deleted segments.

        A copy that was given up is forgotten after the second removal, which comes
        ``late_s`` after the first: a late request may have made its objects meanwhile.
        """
        unfinished = self.manifest.unfinished()
        if not unfinished:
            self._given_up.clear()
            return
        now = time.monotonic()
        over = [
            segment
            for segment in unfinished
            if segment.state == SegmentState.DELETING
            or now >= self._given_up.get(segment.segment_id, now) + self._late_s
        ]
        begun = [s for s in unfinished if s.segment_id not in self._given_up]
        self._delete(list(dict.fromkeys([*begun, *over])))
        self._given_up.update((segment.segment_id, now) for segment in begun)
        if over:
            self._save(self.manifest.without({s.segment_id for s in over}))

    def _remove_below(self, log_start_offset: int) -> None:
        while True:
            going = [
                segment
                for segment in self.manifest.copied()
                if segment.next_base <= log_start_offset
            ][:_DELETE_AT_ONCE]
            if not going:
                return
            self._save(_deleting(self.manifest, going))
            self._remove_unfinished()

    def _remove_all(self, log_start_offset: int) -> None:
        """Remove all segments and their list (the manifest) from the store.

        This is done when remote storage was switched off for the topic. If it has been
        switched on again since the plan was made, retention may have removed local
        segments meanwhile. What only the store has from ``log_start_offset`` on, stays.

        If this process is killed before the last step, the next pass writes the
        manifest anew, without segments, and removes it again.
        """
        self.lag = []
        self._remove_below(log_start_offset)
        while self._mark_copies():
            self._remove_unfinished()
        if self.manifest.segments:
            # They are in the store only; or they are copies that were given up, whose
            # objects may still come.
            return
        self._fence()
        self._store.delete([manifest_key(self._prefix)])
        remove_if_exists(f"{self._directory}/{REMOTE_MANIFEST_FILE}")
        self._manifest = None

    def _mark_copies(self) -> bool:
        """Mark segments that the local disk has, too, as DELETING; some at a time.

        Retention removes a local segment if the manifest in the directory says COPIED,
        and holds the directory's lock from its look at the manifest on. So here the
        manifest in the directory changes first, under this lock: one of the two leaves
        the segment to the other.

        Returns:
            Whether there were any; False also if another process holds the lock: the
            next pass goes on.
        """
        manifest = self.manifest  # before the lock: it may have to ask the store
        with exclusive(self._directory) as is_free:
            bases = base_offsets(self._directory, LOG_SUFFIX) if is_free else []
            going = [
                segment
                for segment in manifest.copied()
                if bases and segment.base_offset >= bases[0]
            ][:_DELETE_AT_ONCE]
            if not going:
                return False
            manifest = _following(_deleting(manifest, going))
            self._save_local(manifest)
        self._save(manifest)
        return True

    def _delete(
        self, segments: tuple[RemoteSegment, ...] | list[RemoteSegment]
    ) -> None:
        keys = [
            key(self._prefix, s) for s in segments for key in (log_key, indexes_key)
        ]
        if keys:
            self._fence()
            self._store.delete(keys)

    # -- copies ------------------------------------------------------------------------

    def _require_same_log(self, directory: str) -> None:
        bases = base_offsets(directory, LOG_SUFFIX)
        copied_to = self.manifest.copied_to()
        if bases and bases[-1] < copied_to:
            raise CorruptLogError(
                f"{directory}: its last segment begins at {bases[-1]}, and the"
                f" store has all below {copied_to}: these are other records; nothing"
                " more is copied"
            )

    def _copy(self, base_offset: int, next_base: int) -> int:
        path = segment_file(self._directory, base_offset, LOG_SUFFIX)
        size, largest = check_segment(path)
        segment = RemoteSegment(
            base_offset,
            next_base,
            os.urandom(16).hex(),
            SegmentState.COPYING,
            size,
            largest,
        )
        self._save(self.manifest.with_segment(segment))
        chunks: list[int] = []
        key = log_key(self._prefix, segment)
        self._store.put_stream(key, self._read(path, chunks), size)
        indexes = SegmentIndexes(tuple(chunks), self._files(segment), self._epochs())
        content = indexes.encode()
        self._store.put(indexes_key(self._prefix, segment), content)
        for key, expected in (
            (log_key(self._prefix, segment), size),
            (indexes_key(self._prefix, segment), len(content)),
        ):
            found = self._store.size(key)
            if found != expected:
                raise RemoteStorageError(f"{key} has {found} bytes, not {expected}")
        copied = segment._replace(
            state=SegmentState.COPIED,
            indexes_size=len(content),
            indexes_crc=crc32c(content),
            has_aborted=bool(indexes.files.get(TXN_INDEX_SUFFIX)),
        )
        self._save(self.manifest.with_segment(copied))
        return size

    def _read(self, path: str, chunks: list[int]) -> Iterator[bytes]:
        """Yield a file in chunks of 4 MiB, and add the CRC-32C of each to ``chunks``.

        The checksums are those of the bytes that are sent, so that the bytes that the
        store gives back can be compared with them.
        """
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self._throttle(len(chunk))
                chunks.append(crc32c(chunk))
                yield chunk

    def _files(self, segment: RemoteSegment) -> dict[str, bytes]:
        files = {}
        for suffix, base in (
            (INDEX_SUFFIX, segment.base_offset),
            (TIME_INDEX_SUFFIX, segment.base_offset),
            (TXN_INDEX_SUFFIX, segment.base_offset),
            (SNAPSHOT_SUFFIX, segment.next_base),
        ):
            try:
                with open(segment_file(self._directory, base, suffix), "rb") as file:
                    files[suffix] = file.read()
            except FileNotFoundError:
                continue  # no transaction was aborted, or no producer was known
        return files

    def _epochs(self) -> bytes:
        try:
            with open(f"{self._directory}/{LEADER_EPOCHS}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""  # a power cut took the file: all records are of epoch 0


def _following(manifest: RemoteManifest) -> RemoteManifest:
    """Return a manifest with the number of a new generation, to be written next.

    It is higher than in any attempt before, also in those of a process that was killed.
    """
    return manifest._replace(generation=max(manifest.generation + 1, time.time_ns()))


def _deleting(
    manifest: RemoteManifest, segments: Iterable[RemoteSegment]
) -> RemoteManifest:
    """Return a copy of a manifest in which some of its segments are DELETING."""
    for segment in segments:
        gone = segment._replace(state=SegmentState.DELETING)
        manifest = manifest.with_segment(gone)
    return manifest


def _candidates(plan: PartitionPlan, copied_to: int) -> Iterator[tuple[int, int]]:
    for base, following in pairwise(base_offsets(plan.directory, LOG_SUFFIX)):
        if following > plan.copy_below:
            return
        if following > plan.log_start_offset and base >= copied_to:
            yield base, following


def check_segment(path: str) -> tuple[int, int]:
    """Check a closed segment; return its size in bytes and its largest timestamp in ms.

    If no record has a timestamp, the file's modification time is returned, as for
    retention.

    Args:
        path: the `.log` file.

    Raises:
        CorruptLogError: a batch is not whole, or its checksum is wrong.
        OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        end, largest = 0, -1
        for _, end, _, _, timestamp, _ in scan_valid_batches(fd, 0, stat.st_size):
            largest = max(largest, timestamp)
    finally:
        os.close(fd)
    if end != stat.st_size:
        raise CorruptLogError(f"{path}: no valid batch at {end} of {stat.st_size}")
    return stat.st_size, largest if largest >= 0 else int(stat.st_mtime * 1000)
