"""RemoteStorage: the housekeeper's child that talks to the remote store."""

from __future__ import annotations

import fcntl
from typing import Final

from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.broker.housekeeper_child import RETRY_S, HousekeeperChild
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.storage.files.log_files import create_file

_LOCK_FILE: Final = ".remote-log-lock"
_READERS_RETRIES: Final = 1


class RemoteStorage(HousekeeperChild):
    """Starts the process that copies closed segments to the remote store.

    The process also reads them there, for handlers that serve old records.
    """

    NAME = "the remote log manager"
    TITLE = "remote-log-manager"
    PASSING = (RemoteStorageError,)

    def _serve(self) -> None:
        from mpbroker.storage.remote.object_store import ObjectStore
        from mpbroker.storage.remote.remote_log_manager import (
            RemoteLimits,
            RemoteLogManager,
        )
        from mpbroker.storage.remote.retry_backoff import BackoffLimits
        from mpbroker.storage.remote.store_owner import StoreOwner, read_token

        config = self._parts.config
        directories = [each.path for each in self._parts.directories]
        # Until the child of a killed housekeeper is gone: only one process may write.
        lock = create_file(f"{directories[0]}/{_LOCK_FILE}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        url = config.remote_storage_place
        assert url is not None
        store = ObjectStore(url, retry_s=RETRY_S)
        # The start has claimed the place in the store for this broker; if the store did
        # not answer then, the copier claims it.
        owner = StoreOwner(
            self._parts.cluster_id, config.node_id, read_token(directories[0])
        )
        RemoteLogManager(
            store,
            directories,
            self._tell,
            owner,
            RemoteLimits(
                config.remote_storage_cache_bytes,
                config.remote_log_reader_threads,
                config.remote_metadata_interval_ms / 1000,
                config.remote_log_manager_copy_max_bytes_per_second,
                config.remote_log_manager_fetch_max_bytes_per_second,
                BackoffLimits(
                    config.remote_log_manager_task_retry_backoff_ms / 1000,
                    config.remote_log_manager_task_retry_backoff_max_ms / 1000,
                    config.remote_log_manager_task_retry_jitter,
                ),
                config.remote_log_manager_copier_thread_pool_size,
            ),
            # For reads: a client is to learn of a failure soon, and asks again.
            ObjectStore(url, retry_s=RETRY_S, retries=_READERS_RETRIES),
        ).run()

    def _tell(self, row: int) -> None:
        """Wake every handler that waits for records of a partition from the store.

        Args:
            row: the partition's entry in shared memory.
        """
        memory = self._parts.memory
        if not 0 <= row < MAX_PARTITIONS:
            return
        waiters = memory.table.row(row).take_waiters()
        for handler, notices in enumerate(memory.notices):
            if waiters >> handler & 1:
                notices.put(row)
