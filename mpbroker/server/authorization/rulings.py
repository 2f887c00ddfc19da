"""Define what an authorization rule is and returns, and what the rules share.

A rule removes the denied parts from the request message and returns a Ruling. It raises
ApiError if the whole answer is one error code.

Source: the checks in each handler of Kafka's KafkaApis and ControllerApis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message
from mpbroker.server.authorization.authorization import Access

# Edits the response of the handler: adds the refusals, or removes what is hidden.
Amend = Callable[[Any], None]
# A message is the whole answer; the handler is not called. Otherwise the handler gets
# the request, and Amend edits its response. None: the response stays as it is.
Ruling = Message | Amend | None
# Takes the sender's access, the request message and the version of the API.
Rule = Callable[[Access, Any, int], Ruling]


def cluster_rule(operation: AclOperation) -> Rule:
    """Return the rule that requires one operation on the cluster.

    The rule raises ApiError CLUSTER_AUTHORIZATION_FAILED if the sender lacks it.
    """

    def rule(access: Access, request: Message, version: int) -> None:
        access.require_cluster(operation)

    return rule


def take_denied(
    request: Struct, field: str, is_allowed: Callable[[Any], bool]
) -> list[Any]:
    """Remove the denied items from a list field of a request; return these items.

    Args:
        request: the request, which is changed.
        field: the name of the list field.
        is_allowed: returns whether an item stays.
    """
    allowed: list[Any] = []
    denied: list[Any] = []
    for item in getattr(request, field):
        (allowed if is_allowed(item) else denied).append(item)
    setattr(request, field, allowed)
    return denied


def append_to(field: str, refusals: list[Any]) -> Amend | None:
    """Return a function that appends refusals to a list field of the response.

    Returns:
        The function; None if there are no refusals.
    """
    if not refusals:
        return None

    def amend(response: Any) -> None:
        getattr(response, field).extend(refusals)

    return amend
