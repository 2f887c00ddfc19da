"""Descriptors between processes: they arrive whole, or it is said that they did not."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

import pytest

from mpbroker.ipc.fdpass import MAX_FDS, FdsDroppedError, recv_fds, send_fds
from tests.support.children import fork


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_descriptor_and_its_message_arrive_together(pair):
    reader, writer = os.pipe()
    send_fds(pair[0], b"hello", [writer])
    os.close(writer)
    message, (fd,) = recv_fds(pair[1], 100, 1)
    assert message == b"hello"
    os.write(fd, b"through it")
    assert os.read(reader, 100) == b"through it"
    assert not os.get_inheritable(fd)
    os.close(fd)
    os.close(reader)


def test_messages_keep_their_borders_and_their_order(pair):
    for number in range(5):
        send_fds(pair[0], b"%d" % number, [0])
    for number in range(5):
        message, fds = recv_fds(pair[1], 100, 1)
        assert message == b"%d" % number
        assert len(fds) == 1
        os.close(fds[0])


def test_as_many_as_the_kernel_allows_go_in_one_message(pair):
    send_fds(pair[0], b"x", [0] * MAX_FDS)
    _, fds = recv_fds(pair[1], 1, MAX_FDS)
    assert len(fds) == MAX_FDS
    for fd in fds:
        os.close(fd)
    with pytest.raises(OSError) as refused:
        send_fds(pair[0], b"x", [0] * (MAX_FDS + 1))
    assert refused.value.errno == errno.EINVAL


def test_a_closed_end_reads_as_nothing(pair):
    pair[0].close()
    assert recv_fds(pair[1], 100, 1) == (b"", [])


def test_nothing_there_is_a_blocking_error(pair):
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_fds(pair[1], 100, 1)


def test_a_full_queue_is_a_blocking_error_and_sends_nothing(pair):
    for end in pair:
        end.setblocking(False)
    sent = received = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 100_000:
            send_fds(pair[0], b"x" * 1000, [0])
            sent += 1
    with contextlib.suppress(BlockingIOError):
        while received < 100_000:
            _, fds = recv_fds(pair[1], 1000, 1)
            os.close(fds[0])
            received += 1
    assert 0 < received == sent < 100_000


def test_more_descriptors_than_were_asked_for_are_an_error_and_leak_none(pair):
    before = open_fds()
    send_fds(pair[0], b"x", [0, 0, 0])
    with pytest.raises(FdsDroppedError, match="ulimit"):
        recv_fds(pair[1], 100, 1)
    assert open_fds() == before


def test_a_receiver_at_its_limit_of_open_files_is_told_so_and_leaks_none(pair):
    def receive():
        used = max(map(int, open_fds())) + 1
        while True:  # fill the holes below the limit
            fd = os.dup(0)
            if fd >= used:
                os.close(fd)
                break
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        with pytest.raises(FdsDroppedError, match="LimitNOFILE"):
            recv_fds(pair[1], 100, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        with pytest.raises(OSError):
            os.dup(0)  # it is as full as before, and no fuller

    send_fds(pair[0], b"x", [0])
    assert fork(receive) == 0


def test_a_sender_whose_receiver_is_gone_gets_an_error(pair):
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send_fds(pair[0], b"x", [0])
