"""Which topics a pattern stands for, for each member that subscribes by it.

Where there is an authorizer a pattern shows a member only topics that it may describe,
as they are at its heartbeats: two members may see different topics by one pattern. What
the group keeps in its log are all that some member sees. Until a member is heard again
after a restart of the coordinator it sees those.

Source: KIP-848; Kafka's GroupMetadataManager, filterTopicDescribeAuthorizedTopics,
which asks for whichever member had the pattern looked up, and shows all members that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.coordinator.topic_regex import InvalidRegexError, TopicRegex
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

if TYPE_CHECKING:
    from mpbroker.coordinator.context import Topics
    from mpbroker.coordinator.groups.consumer_group import ConsumerGroup, ConsumerMember
    from mpbroker.server.authorization.authorization import Access


def compile_pattern(pattern: str) -> TopicRegex:
    """Compile a member's pattern.

    The result is not cached, so that clients' patterns take no memory between requests.

    Raises:
        ApiError: INVALID_REGULAR_EXPRESSION.
    """
    try:
        return TopicRegex(pattern)
    except InvalidRegexError as error:
        raise ApiError(
            ErrorCode.INVALID_REGULAR_EXPRESSION,
            f"SubscribedTopicRegex `{pattern[:200]}` is not a valid regular"
            f" expression: {error}.",
        ) from None


def see(
    group: ConsumerGroup, member: ConsumerMember, access: Access | None, topics: Topics
) -> bool:
    """Look up what a member's pattern shows it; say whether that is news.

    Args:
        access: what the member may do; None: everything.
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
    """Return the topics of each pattern of a group.

    Args:
        is_guarded: who has not been heard yet may not see all that there is.
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
    """The topics that match; internal ones are nobody's business."""
    try:
        regex = compile_pattern(pattern)
    except ApiError:
        return frozenset()  # it is in the log of a version that took more
    return frozenset(
        name
        for name in topics.topic_names()
        if not name.startswith("__") and regex.matches(name)
    )
