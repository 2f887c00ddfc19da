"""A word of a segment is stored at once: no reader sees a part of it, or a zero."""

from __future__ import annotations

import os

from mpbroker.ipc.segment import Segment
from tests.support.children import running


def test_a_reader_never_sees_anything_but_what_was_stored():
    segment = Segment.create("cursor-test", 4096)
    words = segment.words
    values = (0x0101_0101_0101_0101, 0x7E7E_7E7E_7E7E_7E7E)
    words[16] = values[0]

    def write() -> None:
        while not words[32]:
            words[16] = values[1]
            words[16] = values[0]

    with running(write):
        seen: set[int] = set()
        while len(seen) < len(values):  # until the writer has run beside us
            seen |= {words[16] for _ in range(300_000)}
        words[32] = 1
    os.close(segment.fd)
    assert seen == set(values)


def test_a_cursor_that_only_grows_is_never_seen_to_go_back():
    segment = Segment.create("cursor-test", 4096)
    words = segment.words

    def write() -> None:
        number = 0
        while not words[32]:
            number += 1_000_003  # several bytes change at once
            words[16] = number

    with running(write):
        last = 0
        while not last:  # until the writer has run beside us
            for _ in range(200_000):
                seen = words[16]
                assert seen >= last
                last = seen
        words[32] = 1
    os.close(segment.fd)
