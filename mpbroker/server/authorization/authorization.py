"""Ask the authorizer what a request's sender may do, and keep its decisions.

A rule judges each request before its handler gets it. The rule removes from the message
the parts that the sender has no permission for, and adds refusals to the answer. The
rows of apis.py name the rule of each API; message_apis.py applies it.

Produce and Fetch have no rule in a handler process. Their services ask for each topic
(produce_service.py, fetch_service.py).

Without an authorizer this module is not used. With an authorizer, decisions are kept
until its version changes. A decision that is kept costs one look-up for each resource.

Source: Kafka's AuthHelper, KafkaApis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.acl import (
    CLUSTER_NAME,
    OPERATIONS,
    AclOperation,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.authorization.authorizer import Authorizer, Resource
from mpbroker.server.authorization.denial_log import DenialLog
from mpbroker.server.errors import AuthorizerError
from mpbroker.server.request import Request
from mpbroker.server.request_context import (
    RequestContext,
    RequestContexts,
    Sender,
)

# A bound of memory: clients may name any number of resources.
_MAX_DECISIONS: Final = 50_000

_Decisions = dict[tuple[Sender, AclOperation, ResourceType, str], bool]


class Topics(Protocol):
    """Finds topics: the part of TopicRegistry, the view of all topics, used here."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...

    def topics(self) -> list[Topic]: ...


class Access:
    """Checks the permissions of the sender of one request.

    Attributes:
        authorizer: decides about permissions.
        topics: the topics, for rules about requests that name topics by id, or that
            want all of them.
        auto_create_topics: auto.create.topics.enable.
        client: the sender and the request's header, as the authorizer gets them.
        sender: principal, host and listener; equal senders share the kept decisions.
        version: the version of the authorizer's rules when the request came; None:
            decisions must not be kept.
    """

    __slots__ = (
        "_decisions",
        "_denials",
        "authorizer",
        "auto_create_topics",
        "client",
        "sender",
        "topics",
        "version",
    )

    def __init__(
        self,
        authorizer: Authorizer,
        context: RequestContext,
        sender: Sender,
        decisions: _Decisions | None,
        denials: DenialLog,
        topics: Topics,
        version: int | None,
        *,
        auto_create_topics: bool,
    ) -> None:
        self.authorizer = authorizer
        self.sender = sender
        self.version = version
        self._decisions = decisions
        self._denials = denials
        self.client = context
        self.topics = topics
        self.auto_create_topics = auto_create_topics

    def may(
        self,
        operation: AclOperation,
        resource_type: ResourceType,
        name: str,
        *,
        log: bool = True,
    ) -> bool:
        """Return whether the sender may do an operation on a resource.

        Args:
            operation: the operation.
            resource_type: the resource's type.
            name: the resource's name.
            log: whether to log a denial. False if the request did not name the
                resource, or if another permission may serve instead.

        Raises:
            AuthorizerError: the authorizer raised an exception.
        """
        key = self.sender, operation, resource_type, name
        decisions = self._decisions
        allowed = None if decisions is None else decisions.get(key)
        if allowed is None:
            allowed = self._ask(operation, Resource(resource_type, name))
            if decisions is not None:
                if len(decisions) >= _MAX_DECISIONS:
                    decisions.clear()
                decisions[key] = allowed
        if log and not allowed:
            self._denials.note(self.client, operation, resource_type, name)
        return allowed

    def _ask(self, operation: AclOperation, resource: Resource) -> bool:
        try:
            allowed = self.authorizer.authorize(self.client, operation, resource)
        except Exception as error:
            raise AuthorizerError(
                f"{type(self.authorizer).__name__} raised {error!r} when asked for"
                f" {operation.name} of {resource.type.name}"
            ) from error
        # Compare with True: another object, returned by mistake, must not allow.
        return allowed is True

    def may_topic(
        self, operation: AclOperation, name: str, *, log: bool = True
    ) -> bool:
        return self.may(operation, ResourceType.TOPIC, name, log=log)

    def may_cluster(self, operation: AclOperation, *, log: bool = True) -> bool:
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME, log=log)

    def may_group(
        self, operation: AclOperation, group_id: str, *, log: bool = True
    ) -> bool:
        return self.may(operation, ResourceType.GROUP, group_id, log=log)

    def may_some_topic(self, operation: AclOperation) -> bool:
        """Return whether the sender may do an operation on at least one topic."""
        return self.authorizer.authorize_by_resource_type(
            self.client, operation, ResourceType.TOPIC
        )

    def operations(self, resource_type: ResourceType, name: str) -> int:
        """Return which operations the sender may do on a resource.

        Bit N of the result is AclOperation N.
        """
        bits = 0
        for operation in OPERATIONS[resource_type]:
            if self.may(operation, resource_type, name, log=False):
                bits |= 1 << operation
        return bits

    def may_read(self, topic: str) -> bool:
        return self.may(AclOperation.READ, ResourceType.TOPIC, topic)

    def require_write(self, topic: str) -> None:
        """Refuse a sender that may not write to a topic.

        Raises:
            ApiError: TOPIC_AUTHORIZATION_FAILED.
        """
        if not self.may(AclOperation.WRITE, ResourceType.TOPIC, topic):
            raise ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, TOPIC_DENIED)

    def write_check(self, transactional_id: str | None) -> Callable[[str], None]:
        """Return a function that raises ApiError if a topic must not be written to.

        Args:
            transactional_id: the id of the Produce; None: it has none. If the sender
                lacks WRITE of the id, the function refuses every topic.
        """
        if transactional_id is None or self.may(
            AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id
        ):
            return self.require_write
        return _deny_transactional_id

    def require_cluster(self, operation: AclOperation) -> None:
        """Refuse a sender that may not do an operation on the cluster.

        Raises:
            ApiError: CLUSTER_AUTHORIZATION_FAILED.
        """
        if not self.may_cluster(operation):
            raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, CLUSTER_DENIED)

    def require_group(self, operation: AclOperation, group_id: str) -> None:
        """Refuse a sender that may not do an operation on a group.

        Raises:
            ApiError: GROUP_AUTHORIZATION_FAILED.
        """
        if not self.may_group(operation, group_id):
            raise ApiError(ErrorCode.GROUP_AUTHORIZATION_FAILED, GROUP_DENIED)


TOPIC_DENIED: Final = "Topic authorization failed."
GROUP_DENIED: Final = "Group authorization failed."
CLUSTER_DENIED: Final = "Cluster authorization failed."
TRANSACTIONAL_ID_DENIED: Final = "Transactional Id authorization failed."


def _deny_transactional_id(topic: str) -> None:
    raise ApiError(
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, TRANSACTIONAL_ID_DENIED
    )


class Authorization:
    """Asks the authorizer of one process, and keeps its decisions.

    Args:
        authorizer: decides about permissions.
        contexts: finds the sender of a request.
        topics: the topic registry.
        auto_create_topics: auto.create.topics.enable.
        denials: logs denials; None: a new DenialLog does.
    """

    def __init__(
        self,
        authorizer: Authorizer,
        contexts: RequestContexts,
        topics: Topics,
        *,
        auto_create_topics: bool,
        denials: DenialLog | None = None,
    ) -> None:
        self.authorizer = authorizer
        self._contexts = contexts
        self._topics = topics
        self._auto_create_topics = auto_create_topics
        self._denials = denials or DenialLog()
        self._version: int | None = None
        self._decisions: _Decisions = {}

    def access(self, request: Request) -> Access | None:
        """Return an object that checks the sender's permissions.

        Return None if the sender has disconnected.
        """
        contexts = self._contexts
        sender = contexts.sender(request.connection, request.slot)
        if sender is None:
            return None
        version = self.authorizer.version
        if version != self._version:
            self._decisions.clear()
            self._version = version
        context = RequestContext(sender, request, contexts.name)
        return Access(
            self.authorizer,
            context,
            sender,
            None if version is None else self._decisions,
            self._denials,
            self._topics,
            version,
            auto_create_topics=self._auto_create_topics,
        )

    @property
    def version(self) -> int | None:
        """The version of the authorizer's rules; None: decisions must not be kept.

        It is also None if the authorizer raises an exception when asked for it.
        """
        try:
            return self.authorizer.version
        except Exception:  # noqa: BLE001 - `access` of the next request raises it
            return None

    def everybody_may(self, operation: AclOperation, topic: str) -> bool:
        """Return whether all senders may do an operation on a topic.

        True holds until the authorizer's version changes. Return False also if the
        authorizer raises an exception or has no version.
        """
        authorizer, resource = self.authorizer, Resource(ResourceType.TOPIC, topic)
        try:
            return (
                authorizer.version is not None
                and authorizer.everybody_may(operation, resource) is True
            )
        except Exception:  # noqa: BLE001 - then the authorizer decides each request
            return False
