"""The broker, whose coordinators load no transactions while somebody holds a lock.

python -m tests.faults.held_loads LOCK LAYOUT serve ...

With "layout" as LAYOUT it has another layout of shared memory, as of another version.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator


def main() -> int:
    lock, layout = sys.argv[1:3]
    del sys.argv[1:3]
    if layout == "layout":
        from tests.supervisor.upgrade.newcomer import use_another_layout

        use_another_layout()
    from mpbroker.coordinator.transactions.transaction_loading import (
        TransactionLoading,
    )

    load = TransactionLoading.replay

    def wait_and_load(self: TransactionLoading, partition: int) -> Iterator[int]:
        fd = os.open(lock, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.close(fd)
        yield from load(self, partition)

    TransactionLoading.replay = wait_and_load  # type: ignore[method-assign]
    from mpbroker.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
