"""Clients over Unix sockets, when others are told to move."""

from __future__ import annotations

import socket

from mpbroker.network.unix_processor import UnixProcessor
from mpbroker.supervisor.connection_moves import is_moved, move_connections
from tests.network import rig
from tests.network.rig import Rig, frame


class UnixRig(Rig):
    def start_processor(self) -> None:
        before, rig.Processor = rig.Processor, UnixProcessor
        try:
            super().start_processor()
        finally:
            rig.Processor = before


def test_who_is_answered_while_others_move_is_heard_again(make_rig):
    made = make_rig(kind=UnixRig)
    made.processor._compiled = None  # it knows of no departures
    made.answer = made.hold
    client = made.connect(socket.socketpair())
    client.send(frame(b"first") + frame(b"behind it"))
    made.pump(lambda: made.held)
    move_connections(made.memory, 0, [1], 1)
    made.processor._look()  # as the doorbell makes it, before the answer is out
    made.release()
    made.pump(lambda: len(made.held) == 1 and client.frames() == [b"first"])
    made.release()
    made.pump(lambda: client.frames() == [b"first", b"behind it"])
    assert is_moved(made.memory, 0)
