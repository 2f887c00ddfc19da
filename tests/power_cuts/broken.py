"""mpbroker with one defect, which a campaign of power cuts must find.

A directory that is not forced to disk is not among them: ext4 stores all names with the
next file that is.

python -m tests.power_cuts.broken DEFECT serve ...
"""

import sys

from mpbroker.cli import main
from mpbroker.coordinator.durability import Durability
from mpbroker.metadata import metadata_log
from mpbroker.storage.log.log_sync import LogSync


def forget_log_syncs() -> None:
    """Answer acks=all when the records are in the page cache."""
    LogSync.segments_to_sync = lambda self, from_offset, to_offset: []


def forget_metadata_syncs() -> None:
    """Answer changes of topics when they are in the page cache."""

    class Os:
        def __getattr__(self, name):
            return getattr(os, name)

        def fdatasync(self, fd):
            pass

    os = metadata_log.os
    metadata_log.os = Os()


def forget_coordinator_syncs() -> None:
    """Answer commits of offsets and transactions from the page cache."""
    Durability.when = lambda self, awaited, complete, now_ns: complete([])


DEFECTS = {
    "log": forget_log_syncs,
    "metadata": forget_metadata_syncs,
    "coordinator": forget_coordinator_syncs,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    sys.exit(main())
