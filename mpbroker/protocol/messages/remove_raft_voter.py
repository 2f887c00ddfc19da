"""RemoveRaftVoter: remove a controller from the voters of the metadata log.

Source: Kafka protocol guide, "RemoveRaftVoter".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT16, INT32, STRING, UUID, field
from mpbroker.protocol.message import Message


class RemoveRaftVoterRequest(
    Message, api_key=ApiKey.REMOVE_RAFT_VOTER, versions=(0, 0), flexible_from=0
):
    cluster_id: str | None = field(STRING, nullable="0+")
    voter_id: int = field(INT32)
    voter_directory_id: bytes = field(UUID)


class RemoveRaftVoterResponse(
    Message, api_key=ApiKey.REMOVE_RAFT_VOTER, versions=(0, 0), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", ignorable=True)
