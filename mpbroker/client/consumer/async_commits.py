"""AsyncCommits sends commits that the consumer does not wait for, in their order.

A thread sends them, one after another. The consumer's own thread calls the callbacks,
in a later call of the consumer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition

_log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, int]
CommitCallback = Callable[[Offsets, MpbrokerError | None], object]


class _Commit(NamedTuple):
    offsets: Offsets
    callback: CommitCallback | None
    result: Future[None]


class AsyncCommits:
    """Sends commits in a thread, in order, and calls their callbacks later."""

    def __init__(self) -> None:
        self._commits: deque[_Commit] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def add(
        self,
        send: Callable[[], None],
        offsets: Offsets,
        callback: CommitCallback | None,
    ) -> None:
        """Queue a commit, which the thread sends after all earlier ones.

        Args:
            send: a function that commits the offsets; the thread calls it.
            offsets: the committed offsets, which the callback gets.
            callback: called with the offsets, and an error or None. None: an error is
                logged.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kafka-async-commit-thread")
        self._commits.append(_Commit(offsets, callback, self._thread.submit(send)))

    def deliver(self) -> None:
        """Call the callbacks of the commits that have ended."""
        while self._commits and self._commits[0].result.done():
            commit = self._commits.popleft()
            error = commit.result.exception()
            if error is not None and not isinstance(error, MpbrokerError):
                raise error  # a fault of this client
            if commit.callback is not None:
                commit.callback(commit.offsets, error)
            elif error is not None:
                _log.warning("offsets are not committed: %s", error)

    def wait(self) -> None:
        """Wait until all commits have ended; a later one must not overtake them."""
        for commit in list(self._commits):
            commit.result.exception()
        self.deliver()

    def close(self) -> None:
        """Wait for all commits, and end the thread.

        If the wait is interrupted, commits that have not begun are given up.
        """
        is_done = False
        try:
            self.wait()
            is_done = True
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=is_done, cancel_futures=True)
