"""Peers that read slowly, close half or all of it, or are not there any more."""

from __future__ import annotations

import socket
import struct

import pytest

from mpbroker.base.file_id import file_id
from mpbroker.ipc.layout import (
    CONNECTION_SLOT,
    Phase,
    ProcessorCounter,
    SlotState,
    connection_row,
)
from mpbroker.ipc.response_parts import FilePart
from mpbroker.supervisor.repair.recovery import Repair
from tests.network.rig import connected_pair, echo, frame
from tests.support.inodes import replace_with_same_inode

SIZE = 20_000_000


def big_answer(end, slot, body):
    end.send_bytes(slot, frame(body * (SIZE // len(body))))


def narrow_pair():
    """A connection whose kernel buffers hold little."""
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        return socket.socket(fileno=client.detach()), accepted


# -- slow readers -------------------------------------------------------------------


def test_a_huge_answer_waits_for_a_slow_reader_and_others_do_not(make_rig):
    rig = make_rig(
        answer=lambda end, slot, body: (big_answer if body == b"big" else echo)(
            end, slot, body
        )
    )
    slow, quick = rig.connect(), rig.connect()
    slow.reads = False
    slow.send(frame(b"big"))
    rig.pump(lambda: SlotState.RESPONDING in rig.busy_slots().values())
    for number in range(20):
        quick.send(frame(b"%d" % number))
    rig.pump(lambda: len(quick.frames()) == 20)
    assert not slow.frames()
    slow.reads = True
    rig.pump(slow.frames)
    assert slow.frames() == [b"big" * (SIZE // 3)]


def test_what_was_pipelined_behind_a_slowly_read_answer_is_answered_after_it(make_rig):
    rig = make_rig(
        answer=lambda end, slot, body: (big_answer if body == b"big" else echo)(
            end, slot, body
        )
    )
    client = rig.connect()
    client.reads = False
    client.send(frame(b"big") + frame(b"after"))
    rig.turns()
    assert rig.requests == [b"big"]
    client.reads = True
    rig.pump(lambda: len(client.frames()) == 2)
    assert client.frames()[1] == b"after"


def test_a_slow_reader_that_leaves_gives_its_slot_and_memory_back(make_rig):
    rig = make_rig(answer=big_answer)
    client = rig.connect(narrow_pair())
    client.reads = False
    client.send(frame(b"big"))
    rig.pump(lambda: SlotState.RESPONDING in rig.busy_slots().values())
    client.close()
    rig.pump(lambda: not rig.connections)
    assert rig.nothing_is_held()


def test_a_handler_whose_region_is_full_answers_when_slow_readers_have_read(
    make_rig, monkeypatch
):
    """Four answers of 20 MB do not fit its 64 MiB."""
    monkeypatch.setattr("mpbroker.network.connections.PATIENCE_NS", 3600 * 10**9)
    rig = make_rig(answer=big_answer)
    clients = [rig.connect() for _ in range(5)]
    for client in clients:
        client.reads = False
        client.send(frame(b"big"))
    rig.pump(lambda: len(rig.requests) == 5)
    assert rig.handler.has_unplaced
    for client in clients:
        client.reads = True
    rig.pump(lambda: all(client.frames() for client in clients))
    assert not rig.handler.has_unplaced
    assert {client.frames()[0][:3] for client in clients} == {b"big"}


# -- answers from files -------------------------------------------------------------


@pytest.fixture
def segment(tmp_path):
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(bytes(range(256)) * 40_000)  # 10 MB
    return path


def parts_of(path, *ranges):
    with path.open() as file:
        number = file_id(file.fileno())
    return [FilePart(str(path), number, start, length) for start, length in ranges]


def answer_with(*parts):
    def answer(end, slot, body):
        total = sum(p.length if isinstance(p, FilePart) else len(p) for p in parts)
        end.send_parts(slot, [total.to_bytes(4, "big"), *parts])

    return answer


def test_an_answer_of_bytes_and_file_ranges_arrives_in_order(make_rig, segment):
    first, second = parts_of(segment, (100, 50), (5000, 9_000_000))
    rig = make_rig(answer=answer_with(b"head", first, b"middle", second, b"tail"))
    client = rig.connect()
    client.send(frame(b"?") + frame(b"?"))
    rig.pump(lambda: len(client.frames()) == 2)
    data = segment.read_bytes()
    expected = b"head" + data[100:150] + b"middle" + data[5000:9_005_000] + b"tail"
    assert client.frames() == [expected, expected]


def test_a_file_is_sent_to_a_slow_reader_too(make_rig, segment):
    (part,) = parts_of(segment, (0, 10_000_000))
    rig = make_rig(answer=answer_with(b"x", part))
    client = rig.connect(narrow_pair())
    client.reads = False
    client.send(frame(b"?"))
    rig.turns()
    client.reads = True
    rig.pump(client.frames)
    assert client.frames() == [b"x" + segment.read_bytes()[:10_000_000]]


def test_a_segment_that_is_about_to_be_deleted_is_still_sent(make_rig, segment):
    (part,) = parts_of(segment, (0, 1000))
    segment.rename(segment.with_name(segment.name + ".deleted"))
    rig = make_rig(answer=answer_with(part))
    client = rig.connect()
    client.send(frame(b"?"))
    rig.pump(client.frames)


def gone(segment):
    segment.unlink()


def replaced(segment):
    segment.rename(segment.with_name("aside"))
    segment.write_bytes(b"another file" * 1000)


def removed_and_made_anew(segment):
    """As compaction does, which takes longer: the next file has the same inode."""
    replace_with_same_inode(segment, b"another file" * 1000)


def shorter(segment):
    segment.write_bytes(b"short")


def unreadable(segment):
    # Not mkdir in its place: that may well be given the same inode.
    segment.unlink()
    segment.symlink_to(segment)


@pytest.mark.parametrize(
    "happens", [gone, replaced, removed_and_made_anew, shorter, unreadable]
)
def test_a_segment_that_is_not_what_was_meant_closes_only_that_connection(
    make_rig, segment, happens, caplog
):
    (part,) = parts_of(segment, (1000, 1000))
    happens(segment)
    rig = make_rig(answer=answer_with(part))
    other = rig.connect()
    client = rig.connect()
    client.send(frame(b"?"))
    rig.pump(lambda: client.is_closed)
    assert segment.name in caplog.text
    rig.answer = echo
    other.send(frame(b"fine"))
    rig.pump(other.frames)


def test_no_free_descriptor_for_a_segment_closes_only_that_connection(
    make_rig, segment, monkeypatch
):
    """A processor with as many connections as it may have descriptors must live."""
    (part,) = parts_of(segment, (0, 1000))
    rig = make_rig(answer=answer_with(part))
    client, other = rig.connect(), rig.connect()
    rig.pump(lambda: rig.connections == 2)

    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("mpbroker.network.response_sender.os.open", no_more)
        client.send(frame(b"?"))
        rig.pump(lambda: client.is_closed)
    other.send(frame(b"?"))
    rig.pump(other.frames)


# -- peers that go ------------------------------------------------------------------


def test_a_peer_that_closes_is_noticed_and_counted(rig):
    client = rig.connect()
    client.send(frame(b"x"))
    rig.pump(client.frames)
    client.close()
    rig.pump(lambda: not rig.connections)
    assert rig.counter(ProcessorCounter.CLOSED_BY_PEER) == 1


@pytest.mark.parametrize("sent", [b"", b"\0\0", frame(b"abcdef")[:7], b"\0\x30\0\0abc"])
def test_a_peer_that_closes_within_a_frame_leaves_nothing_behind(rig, sent):
    client = rig.connect()
    client.send(sent)
    rig.turns()
    client.close()
    rig.pump(lambda: not rig.connections)
    assert rig.nothing_is_held()


def test_a_peer_that_closes_its_sending_half_gets_all_its_answers(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    client = rig.connect()
    client.send(frame(b"1") + frame(b"2") + frame(b"3"))
    client.turn()
    client.sock.shutdown(socket.SHUT_WR)
    rig.pump(lambda: rig.release() or client.is_closed)
    assert client.frames() == [b"1", b"2", b"3"]


def test_a_peer_that_goes_while_its_request_is_in_flight_costs_no_slot(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    client = rig.connect()
    client.send(frame(b"x" * 20_000) + frame(b"y"))
    rig.pump(lambda: rig.held)
    client.close()
    rig.turns()
    rig.release()
    rig.answer = echo
    rig.pump(lambda: not rig.connections and rig.nothing_is_held())


def test_a_reset_while_a_request_is_in_flight_costs_no_slot(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    client = rig.connect()
    client.send(frame(b"x"))
    rig.pump(lambda: rig.held)
    linger = struct.pack("ii", 1, 0)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.close()
    rig.turns()
    rig.release()
    rig.pump(lambda: not rig.connections and rig.nothing_is_held())


def test_a_connection_that_was_closed_before_it_was_registered_harms_nobody(rig):
    client = rig.connect()
    client.close()
    other = rig.connect()
    other.send(frame(b"x"))
    rig.pump(other.frames)
    rig.pump(lambda: rig.connections == 1)


def test_an_idle_connection_is_closed_and_a_waiting_one_is_not(make_rig):
    rig = make_rig(max_idle_ns=30_000_000)
    rig.answer = rig.hold
    idle, waiting = rig.connect(), rig.connect()
    waiting.send(frame(b"x"))
    rig.pump(lambda: rig.held)
    rig.pump(lambda: idle.is_closed)
    assert rig.counter(ProcessorCounter.CLOSED_IDLE) == 1
    rig.release()
    rig.pump(waiting.frames)
    assert not waiting.is_closed


# -- a processor's successor --------------------------------------------------------


def test_a_client_that_never_waits_for_an_answer_is_let_go_when_all_must_end(make_rig):
    rig = make_rig()
    client, sent = rig.connect(), 0

    def is_closed() -> bool:
        nonlocal sent
        while sent < len(client.frames()) + 5:
            client.send(frame(b"%d" % sent))
            sent += 1
        return client.is_closed

    rig.pump(lambda: is_closed() or client.frames())
    rig.memory.phase = Phase.DRAINING
    rig.pump(is_closed)
    assert client.frames() == rig.requests


def test_a_successor_frees_what_handlers_still_had_and_serves(make_rig):
    rig = make_rig()
    rig.answer = rig.hold
    small, large, partial = (rig.connect() for _ in range(3))
    small.send(frame(b"small"))
    large.send(frame(b"l" * 100_000))
    partial.send(frame(b"p" * 100_000)[:50_000])
    rig.pump(lambda: len(rig.held) == 2)
    for channel in rig.processor._channels.values():
        channel.sock.close()  # as its death does
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    rig.processor.take_over()  # nobody has their sockets
    assert not rig.processor._reader._extents.is_unused  # its bytes are being read
    rig.answer = echo
    client = rig.connect()
    client.send(frame(b"n" * 200_000))
    rig.pump(client.frames)
    rig.release()
    client.close()
    rig.pump(lambda: not rig.connections and rig.nothing_is_held())
    assert small.is_closed or rig.pump(lambda: small.is_closed)


def test_the_row_of_a_connection_that_was_lost_says_which_request_was_its(make_rig):
    """For as long as nobody else has had the row: who came and went since had none."""
    rig = make_rig()
    rig.answer = rig.hold
    rig.connect().send(frame(b"x"))
    rig.pump(lambda: rig.held)
    [(slot, _)] = rig.held
    for channel in rig.processor._channels.values():
        channel.sock.close()
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    rig.processor.take_over()  # nobody has its socket
    words, row = rig.memory.control.words, connection_row(0)
    assert words[row + CONNECTION_SLOT] == -(slot + 1)
    second = rig.connect()
    rig.pump(lambda: rig.connections == 1)
    assert words[row + CONNECTION_SLOT] == 0
    second.close()
    rig.pump(lambda: rig.connections == 0)
    assert words[row + CONNECTION_SLOT] == 0
    rig.release()
    rig.pump(rig.nothing_is_held)


def test_a_successor_counts_its_own_connections_only(make_rig):
    rig = make_rig()
    rig.connect()
    rig.pump(lambda: rig.connections == 1)
    for channel in rig.processor._channels.values():
        channel.sock.close()
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    assert rig.connections == 0


def test_connections_on_their_way_to_a_dead_processor_reach_its_successor(make_rig):
    rig = make_rig()
    client = rig.connect()
    Repair(rig.memory).after_processor(0)
    rig.start_processor()
    client.send(frame(b"x"))
    rig.pump(client.frames)


def test_unix_sockets_are_served_too(rig):
    client = rig.connect(tuple(reversed(socket.socketpair())))
    client.send(frame(b"x"))
    rig.pump(client.frames)


def test_the_kernel_closes_nothing_of_ours(rig):
    """connected_pair is what all the other tests stand on."""
    client, accepted = connected_pair()
    accepted.sendall(b"x")
    assert client.recv(1) == b"x"
    client.close()
    accepted.close()
