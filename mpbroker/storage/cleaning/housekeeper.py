"""Housekeeper: run periodic tasks on the logs, and close them when the broker stops.

The tasks are retention, compaction, flush by time, checkpoints, and the removal of
deleted topics' files, each at its interval.
"""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc import pulse
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.layout import HEADER, HEADER_PHASE, Phase
from mpbroker.ipc.segment import Segment

_LOG = get_logger(__name__)
_SECOND: Final = 1000.0
# A housekeeper that took no turn for much longer hangs: see the supervisor's leases.
_TURN_S: Final = 10.0


class Housekeeper:
    """The main loop of the housekeeper process: runs each task at its interval.

    Args:
        control: the shared memory that has the phase of the broker, such as stopping.
        doorbell: wakes the loop when the phase changes.
        catch_up: replays new metadata records; called before each task.
        tasks: (interval in ms, function) of each task; the function is called with the
            wall clock in ms.
        initial_delay_ms: the longest time before a task runs for the first time.
        shut_down: closes the logs when the broker stops.
        let_go: called between tasks; closes and forgets the logs of deleted partitions.
    """

    def __init__(
        self,
        control: Segment,
        doorbell: Doorbell,
        catch_up: Callable[[], object],
        tasks: Sequence[tuple[int, Callable[[int], object]]],
        initial_delay_ms: int,
        shut_down: Callable[[], None],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._words = control.words
        self._catch_up = catch_up
        self._shut_down = shut_down
        self._let_go = let_go
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)
        now = time.monotonic()
        self._tasks = [
            (
                now + min(initial_delay_ms, interval_ms) / _SECOND,
                number,
                interval_ms,
                task,
            )
            for number, (interval_ms, task) in enumerate(tasks)
        ]
        heapq.heapify(self._tasks)

    def run(self) -> None:
        """Run the tasks that are due until the broker stops; then close the logs."""
        while self._words[HEADER + HEADER_PHASE] < Phase.STOPPED:
            left = self._tasks[0][0] - time.monotonic()
            self._epoll.poll(max(0.0, min(left, _TURN_S)))
            self.turn()
        self._catch_up()
        self._shut_down()

    def turn(self) -> None:
        """Run the tasks that are due; log a failure, and run that task again later."""
        now = time.monotonic()
        while self._tasks[0][0] <= now:
            _, number, interval_ms, task = heapq.heappop(self._tasks)
            following = (now + interval_ms / _SECOND, number, interval_ms, task)
            heapq.heappush(self._tasks, following)
            try:
                self._catch_up()
                task(_now_ms())
            except Exception:  # noqa: BLE001 - the next round tries again
                _LOG.exception("a housekeeping task failed")
            pulse.step()
        pulse.step()
        try:
            self._catch_up()  # it marks what was deleted
            self._let_go()
        except Exception:  # noqa: BLE001 - the next round tries again
            _LOG.exception("deleted topics could not be marked")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
