"""A large answer takes turns with the other connections."""

import os
import socket
from pathlib import Path

import pytest

from mpbroker.ipc.layout import connection_row
from mpbroker.ipc.response_parts import BytesPart
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.errors import SegmentGoneError
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


def test_a_segment_is_found_in_the_directory_that_a_moved_partition_has_left(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "t-0"
    for name in ("t-0", "t-0.1-delete", "t-00.2-delete", "t-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.log").write_text(name)
    path = directory / "0.log"
    inode = path.stat().st_ino
    directory.rename(tmp_path / "t-0.3-delete")
    files = SegmentFiles()
    assert os.pread(files.fd(os.fspath(path), inode), 100, 0) == b"t-0"
    with pytest.raises(SegmentGoneError):
        files.fd(os.fspath(path), (tmp_path / "t-1" / "0.log").stat().st_ino)
    files.close_unused()
