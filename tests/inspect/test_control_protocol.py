"""Frames of the control socket: any bytes, however cut, give maps or an error."""

from __future__ import annotations

import os
import socket
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.inspect.control_protocol import (
    MAX_REQUEST_BYTES,
    ControlProtocolError,
    ControlSocketError,
    FrameReader,
    Peer,
    default_socket_path,
    encode_frame,
    may_control,
    peer_of,
    socket_address,
)

MAPS = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    max_size=4,
)


def read_all(chunks, max_bytes=MAX_REQUEST_BYTES):
    reader = FrameReader(max_bytes)
    found = []
    for chunk in chunks:
        reader.feed(chunk)
        while (value := reader.next_map()) is not None:
            found.append(value)
    return found


@given(st.lists(MAPS, max_size=4), st.integers(1, 9))
def test_maps_do_not_depend_on_how_the_stream_was_cut(maps, step):
    stream = b"".join(map(encode_frame, maps))
    cut = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert read_all(cut) == read_all([stream]) == maps


@given(st.binary(max_size=300))
def test_any_bytes_give_maps_or_a_protocol_error_and_nothing_else(data):
    try:
        found = read_all([data], max_bytes=128)
    except ControlProtocolError:
        return
    assert all(isinstance(value, dict) for value in found)


@given(st.binary(max_size=200))
def test_any_payload_gives_a_map_or_a_protocol_error_and_nothing_else(payload):
    try:
        (found,) = read_all([struct.pack(">I", len(payload)) + payload])
    except ControlProtocolError:
        return
    assert isinstance(found, dict)


def test_a_length_above_the_limit_is_refused_before_its_bytes_come():
    reader = FrameReader(64)
    reader.feed(struct.pack(">I", 65))
    with pytest.raises(ControlProtocolError, match="65 bytes; at most 64"):
        reader.next_map()


def test_nesting_without_end_is_refused():
    payload = b"\x91" * 60_000
    with pytest.raises(ControlProtocolError, match="not msgpack"):
        read_all([struct.pack(">I", len(payload)) + payload])


def test_an_answer_that_nobody_would_read_is_not_sent():
    with pytest.raises(ControlProtocolError, match="in a frame of 10"):
        encode_frame({"text": "x" * 100}, max_bytes=10)


# -- where ---------------------------------------------------------------------------


def test_the_socket_is_in_the_run_time_directory_or_else_with_the_data():
    assert default_socket_path("/data", "") == "/data/control.sock"
    assert default_socket_path("/data", "/run/a:/run/b") == "/run/a/control.sock"


def test_a_path_of_any_length_can_be_bound_and_connected_to(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    path = str(deep / "control.sock")
    assert len(path) > 107
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as one:
        with socket_address(path) as address:
            server.bind(address)
        server.listen()
        assert os.path.exists(path)
        with socket_address(path) as address:
            one.connect(address)


def test_a_name_that_is_too_long_by_itself_is_refused_with_its_length(tmp_path):
    path = str(tmp_path / ("n" * 120))
    refused = pytest.raises(ControlSocketError, match="120 bytes, at most 80")
    with refused, socket_address(path):
        pass


def test_a_deep_directory_that_is_not_there_is_named(tmp_path):
    path = str(tmp_path / ("d" * 120) / "control.sock")
    refused = pytest.raises(ControlSocketError, match="No such file")
    with refused, socket_address(path):
        pass


# -- who -----------------------------------------------------------------------------


def test_the_kernel_says_who_is_at_the_other_end():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        peer = peer_of(here)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert {os.getegid(), *os.getgroups()} <= peer.groups


@pytest.mark.parametrize(
    ("uid", "groups", "allowed"),
    [
        (0, (0,), True),  # root
        (500, (1,), True),  # the broker's own user
        (501, (7, 60), True),  # of the socket's group, though not first
        (501, (501,), False),
        (501, (0,), False),  # root's group is not root
    ],
)
def test_root_the_owner_and_the_sockets_group_may_control(uid, groups, allowed):
    peer = Peer(1, uid, frozenset(groups))
    assert may_control(peer, owner=500, group=60) is allowed


def test_a_frame_is_msgpack_behind_its_length():
    frame = encode_frame({"ok": True})
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert msgpack.unpackb(frame[4:]) == {"ok": True}
