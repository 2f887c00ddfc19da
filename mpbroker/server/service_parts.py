"""What the services of Produce and Fetch share in one handler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.core_cache import CoreCache, NoCoreCache
    from mpbroker.server.purgatory import Purgatory
    from mpbroker.storage.log.partition_log import PartitionLog


class ServiceParts(NamedTuple):
    """The objects that execute, park and answer the requests of one handler.

    Attributes:
        channel: requests come from it, and answers go into it.
        registry: finds topics.
        log: returns a partition's log.
        purgatory: keeps what waits.
        core_cache: learns what the compiled core may execute.
        count_error: told of the API key and the code of each partition's error.
        authorization: says who may do what; None: every sender may do everything.
    """

    channel: HandlerEnd
    registry: TopicRegistry
    log: Callable[[Topic, int], PartitionLog]
    purgatory: Purgatory
    core_cache: CoreCache | NoCoreCache
    count_error: Callable[[int, int], None]
    authorization: Authorization | None = None
