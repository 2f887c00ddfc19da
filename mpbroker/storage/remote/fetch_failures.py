"""FetchFailures: the chunks of segments that the remote store did not give.

A client that got an error asks again within a moment, and so do other clients. So the
store is asked for a chunk only after a backoff. The broker's log has one line when the
store stops answering, and one line for each segment whose objects have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteUnreachableError
from mpbroker.storage.remote.retry_backoff import (
    DEFAULT_BACKOFF,
    BackoffLimits,
    RetryBackoff,
)

logger = get_logger(__name__)
# Chunks beyond this number, which failed longest ago, are forgotten: the store may be
# asked for them at once.
_MOST: Final = 10_000


class FetchFailures:
    """Notes failed fetches from the remote store, and tells when it may be asked again.

    What is fetched is a chunk: 4 MiB of a segment. All caches of a store have one such
    object in common. Several threads may use it.

    Args:
        limits: the limits of the time between two attempts.
    """

    def __init__(self, limits: BackoffLimits = DEFAULT_BACKOFF) -> None:
        self._limits = limits
        self._lock = Lock()  # over all that follows
        self._chunks: OrderedDict[tuple[str, int], RetryBackoff] = OrderedDict()
        self._told: OrderedDict[str, None] = OrderedDict()  # segments
        self._is_away = False

    def may_ask(self, segment_id: str, chunk: int) -> bool:
        """Return whether a chunk may be asked for again, after earlier failures."""
        with self._lock:
            failing = self._chunks.get((segment_id, chunk))
            return failing is None or failing.is_due()

    def failed(self, segment_id: str, chunk: int, what: str, error: Exception) -> None:
        """Note that the store did not give a chunk of a segment; log the first failure.

        Args:
            segment_id: the id of the chunk's segment.
            chunk: the number of the chunk.
            what: the segment's name in the log message.
            error: the error of the store.
        """
        with self._lock:
            key = (segment_id, chunk)
            self._chunks.setdefault(key, RetryBackoff(self._limits)).failed()
            self._chunks.move_to_end(key)
            while len(self._chunks) > _MOST:
                self._chunks.popitem(last=False)
            is_away = isinstance(error, RemoteUnreachableError)
            if segment_id not in self._told and not (is_away and self._is_away):
                logger.error("%s: %s", what, error)
                self._is_away = is_away or self._is_away
            self._told[segment_id] = None
            while len(self._told) > _MOST:
                self._told.popitem(last=False)

    def worked(self, segment_id: str, chunk: int) -> None:
        """Note that the store gave a chunk, and forget the chunk's earlier failures."""
        with self._lock:
            self._chunks.pop((segment_id, chunk), None)
            self._told.pop(segment_id, None)
            if self._is_away:
                self._is_away = False
                logger.info("the remote store can be read again")
