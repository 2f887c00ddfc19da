"""A member of a classic group.

Source: Kafka's ClassicGroupMember.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.coordinator.outbox import Call

# Name and metadata of each protocol (assignor) that a member can use, best first.
Protocols = Sequence[tuple[str, bytes]]


class ClassicMember:
    """What a group knows of one member."""

    __slots__ = (
        "assignment",
        "awaiting_join",
        "awaiting_sync",
        "client_host",
        "client_id",
        "group_instance_id",
        "is_new",
        "member_id",
        "protocol_type",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
    )

    def __init__(
        self,
        member_id: str,
        group_instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocol_type: str,
        protocols: Protocols,
        assignment: bytes = b"",
    ) -> None:
        self.member_id = member_id
        self.group_instance_id = group_instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.session_timeout_ms = session_timeout_ms
        self.protocol_type = protocol_type
        self.protocols = protocols
        self.assignment = assignment
        # A parked JoinGroup or SyncGroup of it; never both.
        self.awaiting_join: Call | None = None
        self.awaiting_sync: Call | None = None
        # Has not been in a generation yet: it may time out although its join waits.
        self.is_new = False

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    def metadata(self, protocol: str) -> bytes:
        """What it said with a protocol; nothing if it does not have it."""
        for name, metadata in self.protocols:
            if name == protocol:
                return metadata
        return b""

    def matches(self, protocols: Protocols) -> bool:
        """Say whether these are the protocols it joined with."""
        return list(self.protocols) == list(protocols)

    def vote(self, candidates: frozenset[str] | set[str]) -> str:
        """Return its first protocol that all members have."""
        for name, _ in self.protocols:
            if name in candidates:
                return name
        raise AssertionError(f"{self.member_id} has none of {sorted(candidates)}")
