"""Read and append to the metadata log of a cluster, which is in its database.

A node decides on a change by its copy of the log, and appends the change if the log
still ends where the copy ends. Otherwise it reads the records of other nodes first, and
decides again. So two nodes never create one topic twice, and the database holds no lock
while a node decides.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError

_RECORDS_AT_ONCE: Final = 1000


class SharedMetadataLog:
    """Reads and appends to the log of a cluster's metadata.

    Args:
        timeout_s: the time limit of each call; None: that of ``database``.
    """

    def __init__(
        self, database: ClusterDatabase, *, timeout_s: float | None = None
    ) -> None:
        self._database = database
        self._timeout_s = timeout_s

    async def read(self, offset: int) -> list[bytes]:
        """Return all records of the cluster's metadata log from an offset on.

        Records that were appended together are returned together, however many they
        are.

        Raises:
            ClusterError: as `ClusterDatabase.rows`.
        """
        records: list[bytes] = []
        while True:
            rows = await self._database.rows(
                "SELECT * FROM mpbroker.read_metadata_v1($1, $2)",
                *(offset + len(records), _RECORDS_AT_ONCE),
                timeout_s=self._timeout_s,
            )
            assert not rows or rows[0]["log_offset"] == offset + len(records)
            records += [row["record"] for row in rows]
            if len(rows) < _RECORDS_AT_ONCE:
                return records

    async def append(
        self, offset: int, records: Sequence[bytes], request: uuid.UUID | None = None
    ) -> bool:
        """Append records if the metadata log ends at an offset; return whether it did.

        Args:
            request: an id of this append. Calls with the same id and the same offset
                append once, and all return True.

        Raises:
            ClusterError: as `ClusterDatabase.rows`.
        """
        (end,) = await self._database.row(
            "SELECT mpbroker.append_metadata_v1($1, $2, $3)",
            *(request or uuid.uuid4(), offset, list(records)),
            timeout_s=self._timeout_s,
        )
        return bool(end >= 0)

    async def check_reaches(self, offset: int) -> None:
        """Check that the cluster's metadata log reaches the end (offset) of a copy.

        Raises:
            ClusterError: it ends before that, perhaps because the database was restored
                from an old backup.
        """
        if offset and not await self.read(offset - 1):
            raise ClusterError(
                f"the cluster's metadata ends before record {offset - 1}, which this"
                " broker has already: was the database restored from an old backup?"
                " Then stop this broker, remove __cluster_metadata-0 from its first"
                " directory, and start it: the copy of the metadata is made anew"
            )
