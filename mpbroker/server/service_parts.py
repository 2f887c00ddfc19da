"""Hold the objects that execute both Produce and Fetch requests in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.base.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.network.request_channel import HandlerEnd
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.core_cache import CoreCache, NoCoreCache
    from mpbroker.server.purgatory import Purgatory
    from mpbroker.storage.log.partition_log import PartitionLog


class ServiceParts(NamedTuple):
    """Holds the objects by which a handler process executes Produce and Fetch requests.

    Attributes:
        channel: requests come from it, and answers go into it.
        registry: finds topics.
        log: returns a partition's log.
        purgatory: keeps the requests that wait.
        core_cache: learns what the compiled core may execute.
        count_error: called with the API key and the code of each partition's error.
        authorization: says who may do what; None: every sender may do everything.
    """

    channel: HandlerEnd
    registry: TopicRegistry
    log: Callable[[Topic, int], PartitionLog]
    purgatory: Purgatory
    core_cache: CoreCache | NoCoreCache
    count_error: Callable[[int, int], None]
    authorization: Authorization | None = None
