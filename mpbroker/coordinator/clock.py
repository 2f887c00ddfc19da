"""The time of the coordinator's process; its state machines are told it."""

import time


class Clock:
    """Wall-clock milliseconds that never go back: session timers must not either."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        return (time.monotonic_ns() + self._offset_ns) // 1_000_000
