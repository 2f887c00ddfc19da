"""A `send` that is interrupted (Ctrl-C, an alarm's handler) costs no other record."""

from __future__ import annotations

import sys
from itertools import count
from types import FrameType

import pytest

from tests.producer.conftest import TIMEOUT_S


class _InterruptedAt:
    """Interrupts at the nth point at which Python looks for signals: calls' ends."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event not in ("call", "c_return") or not module.startswith("mpbroker."):
            return
        self.left -= 1
        if not self.left:
            sys.setprofile(None)
            self.where = f"{module}:{frame.f_lineno}, {frame.f_code.co_name}"
            raise KeyboardInterrupt


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_wherever_send_is_interrupted_all_other_records_are_delivered(
    make_producer, new_topic, codec
):
    topic = new_topic(1)
    producer = make_producer(linger_ms=0, batch_size=300, compression_type=codec)
    producer.partitions_for(topic)
    for nth in count(1):
        futures = []
        interrupted = _InterruptedAt(nth)
        sys.setprofile(interrupted)
        try:
            for number in range(3):  # each but the first closes a batch and opens one
                value = b"%d-%d" % (nth, number) + bytes(200)
                futures.append(producer.send(topic, value, partition=0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        futures.append(producer.send(topic, b"after", partition=0))
        try:
            for future in futures:
                assert future.result(TIMEOUT_S / 4).has_offset
            producer.flush(TIMEOUT_S / 4)
        except TimeoutError as error:
            raise AssertionError(f"interrupted at {interrupted.where}") from error
        if not interrupted.where:
            break
    assert nth > 100
