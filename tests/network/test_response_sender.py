"""A large answer takes turns with the other connections."""

import os
import socket
from pathlib import Path

import pytest

from mpbroker.ipc.layout import connection_row
from mpbroker.ipc.response_parts import BytesPart
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.response_sender import ResponseSender, SegmentFiles, SendResult
from mpbroker.supervisor.memory import BrokerMemory
from tests.network.descriptors import descriptors_left
from tests.support.memory import broker_memory

MIB = 1024 * 1024


class ThirstySelector(ChannelSelector):
    """A reader whose socket is never full, a MiB at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def send(self, channel: Channel, data: memoryview, *, more: bool = False) -> int:
        count = min(len(data), MIB)
        self.taken += count
        return count


def test_a_fast_reader_of_a_large_answer_yields_to_the_others() -> None:
    with broker_memory() as memory:
        yields(memory)


def yields(memory: BrokerMemory) -> None:
    selector = ThirstySelector()
    sender = ResponseSender(memory.arena, selector)
    near, far = socket.socketpair()
    with near, far:
        channel = Channel(near, 0, connection_row(0))
        offset = memory.arena_layout.response_extents(0).start
        result = sender.send_parts(channel, [BytesPart(offset, 10 * MIB)])
        turns = 1
        while result == SendResult.MORE:
            assert selector.taken < 10 * MIB
            before = selector.taken
            result = sender.resume(channel)
            assert selector.taken - before <= 4 * MIB
            turns += 1
        assert result == SendResult.SENT
        assert selector.taken == 10 * MIB
        assert turns > 2


@pytest.mark.parametrize("others", [0, 2])
def test_a_segment_can_be_sent_while_there_is_no_descriptor_left(
    tmp_path: Path, others: int
) -> None:
    files = SegmentFiles()
    paths = [tmp_path / f"{number}.log" for number in range(others + 2)]
    for path in paths:
        path.write_text(path.name)
    inodes = [path.stat().st_ino for path in paths]
    for path, inode in zip(paths[:others], inodes, strict=False):
        files.fd(os.fspath(path), inode)
    with descriptors_left(0):
        for _ in range(2):
            for path, inode in zip(paths, inodes, strict=True):
                fd = files.fd(os.fspath(path), inode)
                assert os.pread(fd, 100, 0) == path.name.encode()
            files.close_unused()
