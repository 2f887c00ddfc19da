"""Find the topics that match a member's pattern (SubscribedLinearRegex).

With an authorizer, a member gets only the matching topics that it may describe; they
are looked up at its heartbeats. So two members with one pattern may get different
topics. The log has the topics that any member of the group gets by the pattern. After a
restart of the coordinator, each member gets all of these until its next heartbeat.

Source: KIP-848; Kafka's GroupMetadataManager, filterTopicDescribeAuthorizedTopics. In
Kafka all members with a pattern get the topics that one of them may describe: the
member at whose heartbeat the pattern was looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.base.linear_regex import InvalidRegexError, LinearRegex
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

if TYPE_CHECKING:
    from mpbroker.coordinator.context import Topics
    from mpbroker.coordinator.groups.consumer_group import ConsumerGroup, ConsumerMember
    from mpbroker.server.authorization.authorization import Access


def compile_pattern(pattern: str) -> LinearRegex:
    """Compile a member's pattern.

    The result is not cached, so that clients' patterns take no memory between requests.

    Raises:
        ApiError: INVALID_REGULAR_EXPRESSION.
    """
    try:
        return LinearRegex(pattern)
    except InvalidRegexError as error:
        raise ApiError(
            ErrorCode.INVALID_REGULAR_EXPRESSION,
            f"SubscribedLinearRegex `{pattern[:200]}` is not a valid regular"
            f" expression: {error}.",
        ) from None


def see(
    group: ConsumerGroup, member: ConsumerMember, access: Access | None, topics: Topics
) -> bool:
    """Look up the topics that match a member's pattern; return whether they changed.

    Only topics that the member may describe count. Without an authorizer look up
    nothing, and return False: `resolve` then finds the same topics for all members.

    Args:
        access: checks the member's permissions; None: there is no authorizer.
    """
    pattern = member.topic_regex
    if access is None or not pattern:
        member.sees = member.seen_by = None
        return False
    seen_by = pattern, topics.version(), access.version
    if seen_by == member.seen_by and access.version is not None:
        return False
    before = member.sees
    if before is None:
        before = group.patterns.get(pattern)
    member.sees = frozenset(
        name
        for name in _matching(pattern, topics)
        if access.may_topic(AclOperation.DESCRIBE, name, log=False)
    )
    member.seen_by = seen_by
    return member.sees != before


def resolve(
    group: ConsumerGroup, topics: Topics, *, is_guarded: bool
) -> dict[str, frozenset[str]]:
    """Return the topics that match each pattern of a group's members.

    Args:
        is_guarded: whether there is an authorizer. Then the topics of a member that has
            sent no heartbeat since the coordinator's start are taken from the log.
    """
    found: dict[str, frozenset[str]] = {}
    for member in group.members.values():
        pattern = member.topic_regex
        if not pattern:
            continue
        names = member.sees
        if names is None and is_guarded:
            names = group.patterns.get(pattern, frozenset())
        elif names is None:
            if pattern in found:
                continue
            names = _matching(pattern, topics)
        found[pattern] = found.get(pattern, frozenset()) | names
    return found


def _matching(pattern: str, topics: Topics) -> frozenset[str]:
    """Return the topics that match a pattern, without internal topics."""
    try:
        regex = compile_pattern(pattern)
    except ApiError:
        return frozenset()  # an earlier version of mpbroker accepted it
    return frozenset(
        name
        for name in topics.topic_names()
        if not name.startswith("__") and regex.matches(name)
    )
