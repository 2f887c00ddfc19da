"""Keep the share sessions: the partitions that each member of a share group fetches.

A session begins with epoch 0 and ends with epoch -1. With each request its epoch grows,
and a request names only the partitions that are added or removed. Sessions are in the
memory of the coordinator only: after its death members begin new ones. A session ends
with its connection, too. The records that its member has acquired are available again
then.

Source: KIP-932; Kafka's ShareSessionCache and SharePartitionManager.
"""

from __future__ import annotations

from typing import Final

from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_LARGEST_EPOCH: Final = 0x7FFF_FFFF
# The limit is that of a fetch session. Each fetch looks at all partitions.
MAX_PARTITIONS: Final = 16_383


class ShareSession:
    """The share-partitions that one member fetches, and the next epoch.

    Attributes:
        epoch: the epoch that the next request must have.
        keys: the share-partitions that are fetched, in the order in which they were
            added.
        connection: the session's connection: its row (the number of its entry in shared
            memory) and the row's generation.
    """

    __slots__ = ("connection", "epoch", "group_id", "keys", "member_id")

    def __init__(
        self, group_id: str, member_id: str, connection: tuple[int, int]
    ) -> None:
        self.group_id = group_id
        self.member_id = member_id
        self.connection = connection
        self.epoch = 1
        self.keys: dict[ShareKey, None] = {}

    def add(self, key: ShareKey) -> None:
        """Add a share-partition to those that the member fetches.

        Raises:
            ApiError: INVALID_REQUEST: the session is full.
        """
        if len(self.keys) >= MAX_PARTITIONS and key not in self.keys:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"A share session has at most {MAX_PARTITIONS} partitions; fetch the"
                " others as another member of the group.",
            )
        self.keys[key] = None


class ShareSessions:
    """Keeps the share sessions, by group and member.

    Args:
        most: the largest number of sessions (group.share.max.share.sessions).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[ShareSession]:
        return list(self._sessions.values())

    def begin(
        self, group_id: str, member_id: str, connection: tuple[int, int]
    ) -> ShareSession:
        """Begin a share session; it replaces an older session of the same member.

        Raises:
            ApiError: SHARE_SESSION_LIMIT_REACHED.
        """
        self._sessions.pop((group_id, member_id), None)
        if len(self._sessions) >= self._most:
            raise ApiError(
                ErrorCode.SHARE_SESSION_LIMIT_REACHED,
                "The limit of share sessions has been reached.",
            )
        session = ShareSession(group_id, member_id, connection)
        self._sessions[group_id, member_id] = session
        return session

    def find(self, group_id: str, member_id: str) -> ShareSession:
        """Return the share session of a group's member.

        Raises:
            ApiError: SHARE_SESSION_NOT_FOUND.
        """
        session = self._sessions.get((group_id, member_id))
        if session is None:
            raise ApiError(
                ErrorCode.SHARE_SESSION_NOT_FOUND, "The share session was not found."
            )
        return session

    def next(self, group_id: str, member_id: str, epoch: int) -> ShareSession:
        """Return a share session for a request, which must have its next epoch.

        Raises:
            ApiError: SHARE_SESSION_NOT_FOUND, INVALID_SHARE_SESSION_EPOCH.
        """
        session = self.find(group_id, member_id)
        if epoch != session.epoch:
            raise ApiError(
                ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                "The share session epoch is invalid.",
            )
        session.epoch = 1 if epoch == _LARGEST_EPOCH else epoch + 1
        return session

    def end(self, session: ShareSession) -> None:
        key = session.group_id, session.member_id
        if self._sessions.get(key) is session:
            del self._sessions[key]
