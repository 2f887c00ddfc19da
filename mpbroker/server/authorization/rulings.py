"""What a rule may say of a request, and what the rules have in common.

A rule takes what is denied out of the request message, and says what becomes of the
answer. Where the whole answer is one error code, it raises ApiError.

Source: Kafka's KafkaApis and ControllerApis, handler by handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message
from mpbroker.server.authorization.authorization import Access

# Puts what was refused into the response of the handler.
Amend = Callable[[Any], None]
# A message: the whole answer, since nothing is left for the handler. Else the request
# goes to the handler, and its response is amended; None: it needs nothing.
Ruling = Message | Amend | None
# Asked with what the sender may do, the request message and its version.
Rule = Callable[[Access, Any, int], Ruling]


def cluster_rule(operation: AclOperation) -> Rule:
    """Return the rule that asks for one operation on the cluster."""

    def rule(access: Access, request: Message, version: int) -> None:
        access.require_cluster(operation)

    return rule


def take_denied(
    request: Struct, field: str, is_allowed: Callable[[Any], bool]
) -> list[Any]:
    """Take out of a list of the request what is denied; return what was taken out."""
    allowed: list[Any] = []
    denied: list[Any] = []
    for item in getattr(request, field):
        (allowed if is_allowed(item) else denied).append(item)
    setattr(request, field, allowed)
    return denied


def append_to(field: str, refusals: list[Any]) -> Amend | None:
    """Return what appends refusals to a list of the response; None: there are none."""
    if not refusals:
        return None

    def amend(response: Any) -> None:
        getattr(response, field).extend(refusals)

    return amend
