"""Define the authorization rule of the APIs about the states of share groups.

rulings.py says what a rule takes and returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from mpbroker.protocol.share_state_answer import state_answer

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access


def share_group_state(access: Access, request: Message, version: int) -> Message | None:
    """Require CLUSTER_ACTION permission for the cluster.

    A refusal is an answer with an error for each partition, since the answers of these
    APIs have no other place for an error.
    """
    if access.may_cluster(AclOperation.CLUSTER_ACTION):
        return None

    def refuse(topic_id: bytes, row: Any, result: Any) -> None:
        result.error_code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED

    return state_answer(request, refuse)
