"""Make a partition's log durable: group commit, recovery points, the clean stop."""

import os

from mpbroker.ipc.layout import RowStatus
from mpbroker.ipc.tables.partition_table import PartitionRow
from mpbroker.metadata.log_config import LogConfig
from mpbroker.storage.files.log_files import remove_uncommitted_segments
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.log_producers import LogProducers


class LogSync(LogProducers):
    """The part of a partition's log that deals with the disk."""

    def __init__(
        self,
        directory: str,
        row: PartitionRow,
        config: LogConfig,
        hints: LoadHints | None = None,
    ) -> None:
        super().__init__(directory, row, config, hints)
        self._directories: list[int] = []

    def segments_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        """Return descriptors to fdatasync for the offsets in a range to be durable.

        Those of the logs that hold them and, if one of these files may be new, of the
        directories that hold its name. They stay open until the next call.

        Raises:
            OSError: a file cannot be opened.
        """
        while True:
            state = self.committed()
            if (
                state[1] != self._active_base
                or self._words[self._structure_word] != self._structure
            ):
                self.refresh(state[1])
            if from_offset > self._active_base:
                return [self._active.fd]
            try:
                return self._files_to_sync(from_offset, to_offset)
            except FileNotFoundError as error:
                # What retention removed meanwhile needs no forcing.
                self._structure_moved_or_fail(error)

    def _files_to_sync(self, from_offset: int, to_offset: int) -> list[int]:
        self.segments.trim()  # not below: what is opened here stays open for the caller
        fds, new = [], False
        for segment in self.segments.from_offset(from_offset):
            if segment.base_offset >= to_offset:
                break
            fds.append(segment.fd)
            new = new or segment.base_offset >= from_offset
        if new:
            fds += self._directory_fds()
        return fds

    def _directory_fds(self) -> list[int]:
        if not self._directories:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            for path in (self.directory, os.path.dirname(self.directory)):
                self._directories.append(os.open(path, flags))
        return self._directories

    def close(self) -> None:
        """Close all files. They open again when needed."""
        super().close()
        opened, self._directories = self._directories, []
        for fd in opened:
            os.close(fd)

    def sync(self, to_offset: int | None = None) -> int:
        """Force all below ``to_offset`` (the log end if None) to disk.

        Returns:
            The durable end offset.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR; the partition is offline for good, because
                after a failed fsync nobody knows what is on disk.
        """
        row = self.row
        state = self.state()
        end = state.log_end_offset
        if to_offset is not None and to_offset <= state.active_base_offset:
            end = to_offset  # the active segment need not be touched
        durable = row.durable_end_offset
        if durable >= (end if to_offset is None else to_offset):
            return durable
        try:
            fds = self.segments_to_sync(durable, end)
        except OSError as error:
            self.fail(error, "cannot be opened to be forced to disk")
        try:
            for fd in fds:
                os.fdatasync(fd)
        except OSError as error:
            row.status = RowStatus.OFFLINE
            self.fail(error, "cannot be forced to disk")
        with row.locked():
            row.durable_end_offset = max(row.durable_end_offset, end)
        return end

    def sync_indexes(self) -> int:
        """Force the indexes of what is durable to disk too.

        Returns:
            The durable end offset: a recovery point, below which a start after a crash
            need not look.
        """
        durable = self.row.durable_end_offset
        if durable == self._indexes_synced:
            return durable
        self.refresh(self.committed()[1])
        for segment in self.segments.from_offset(self._indexes_synced):
            if segment.base_offset < durable:
                segment.sync_indexes()
                segment.close_indexes()
        self._indexes_synced = durable
        return durable

    def first_base_offset(self) -> int:
        """Return where the oldest segment starts."""
        self.refresh(self.committed()[1])
        return self.segments.bases[0]

    def close_cleanly(self) -> int:
        """Force everything to disk and cut what was never committed.

        For the last process that has the log. Loads it first if nobody did, so that
        its recovery is not put off behind a mark that says it was closed cleanly.

        Returns:
            The log end offset.

        Raises:
            ApiError, OSError: it must be recovered at the next start.
        """
        state = self.state()
        self.refresh(state.active_base_offset)
        active = self._active
        with self.row.locked():
            remove_uncommitted_segments(self.directory, state.active_base_offset)
            active.truncate(state.active_size)
            active.offset_index.truncate(state.index_entries)
            active.time_index.truncate(state.time_index_entries)
        self.sync()
        self.sync_indexes()
        if state.log_end_offset:
            self.take_snapshot(sync=True)
        self.close()
        return state.log_end_offset
