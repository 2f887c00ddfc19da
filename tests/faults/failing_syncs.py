"""The broker, whose syncs of files all fail by EIO while a file is there.

python -m tests.faults.failing_syncs FILE serve ...

What was written stays in the page cache, where a broker that is started again finds it.
"""

import errno
import os
import sys

_is_there = sys.argv.pop(1)
_fdatasync = os.fdatasync


def _fail() -> bool:
    return os.path.exists(_is_there)


def _sync_or_fail(fd: int) -> None:
    if _fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    _fdatasync(fd)


os.fdatasync = _sync_or_fail

from mpbroker.cli import main  # noqa: E402 - whoever imports the name gets this
from mpbroker.storage.log.disk_sync import DiskSync, SyncDone  # noqa: E402

_finished, _side_by_side = DiskSync.finished, DiskSync.sync_side_by_side


def _finished_or_failed(self):
    done = _finished(self)
    return [SyncDone(each.token, errno.EIO) for each in done] if _fail() else done


def _side_by_side_or_fail(self, files):
    errors = _side_by_side(self, files)
    return [errno.EIO] * len(errors) if _fail() else errors


DiskSync.finished = _finished_or_failed
DiskSync.sync_side_by_side = _side_by_side_or_fail

sys.exit(main())
