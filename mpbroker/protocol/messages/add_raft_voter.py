"""AddRaftVoter: add a controller to the voters of the metadata log.

From version 1 a request may wait until the change is committed.

Source: Kafka protocol guide, "AddRaftVoter".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    STRING,
    UINT16,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class Listener(Struct):
    name: str = field(STRING)
    host: str = field(STRING)
    port: int = field(UINT16)


class AddRaftVoterRequest(
    Message, api_key=ApiKey.ADD_RAFT_VOTER, versions=(0, 1), flexible_from=0
):
    cluster_id: str | None = field(STRING, nullable="0+")
    timeout_ms: int = field(INT32)
    voter_id: int = field(INT32)
    voter_directory_id: bytes = field(UUID)
    listeners: list[Listener] = array(Listener)
    ack_when_committed: bool = field(BOOLEAN, "1+", default=True)


class AddRaftVoterResponse(
    Message, api_key=ApiKey.ADD_RAFT_VOTER, versions=(0, 1), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", ignorable=True)
