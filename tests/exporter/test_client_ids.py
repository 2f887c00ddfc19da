"""The request log says what clients call themselves, and never what another does."""

from __future__ import annotations

import pytest

from mpbroker.exporter.client_ids import ClientIds
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.counters.request_metrics import log_above, read_logged
from mpbroker.ipc.layout import (
    CONNECTION_OPENED,
    SLOT_RECEIVED,
    connection_row,
    slot_row,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from tests.network.rig import Rig, echo, frame
from tests.support.memory import broker_memory


@pytest.fixture(
    params=[
        pytest.param(
            True, marks=pytest.mark.skipif(not IS_COMPILED, reason="no compiled core")
        ),
        False,
    ],
    ids=["compiled", "python"],
)
def rig(request, monkeypatch):
    monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 0)
    # Memory is given back once a second, when there is nothing to do: then it is gone.
    monkeypatch.setattr("mpbroker.network.processor._HOUSEKEEPING_NS", 1 << 62)
    with broker_memory() as memory:
        made = Rig(memory)
        if not request.param:
            made.processor._compiled = None
        log_above(memory.control.words, 0)
        yield made
        made.end()


class Reader:
    """Reads the log of the rig's processor as the exporter does."""

    def __init__(self, rig) -> None:
        self._words = rig.memory.control.words
        self._client_ids = ClientIds(self._words, rig.memory.arena)
        self._next = 0

    def names(self):
        found, _, self._next = read_logged(self._words, 0, self._next)
        self._client_ids.look(0, found)
        return [self._client_ids.of(each) for each in found]


def ask(rig, client, name, count=1, body=b"body"):
    before = len(client.frames())
    for number in range(count):
        header = encode_request_header(ApiKey.METADATA, 9, before + number, name)
        client.send(frame(header + body))
    rig.pump(lambda: len(client.frames()) == before + count)


def test_each_request_has_the_name_of_its_client(rig):
    reader, clients = Reader(rig), [rig.connect() for _ in range(3)]
    names = ["app-1", "", "größe"]
    for client, name in zip(clients, names, strict=True):
        ask(rig, client, name)
    assert reader.names() == names
    for client, name in reversed(list(zip(clients, names, strict=True))):
        ask(rig, client, name)
    assert reader.names() == names[::-1]


def test_requests_whose_bytes_are_gone_are_of_who_is_still_there(rig):
    reader, client, other = Reader(rig), rig.connect(), rig.connect()
    ask(rig, client, "busy", 40)
    ask(rig, other, "other", 2)
    assert reader.names() == ["busy"] * 40 + ["other"] * 2


def test_a_slow_request_has_its_name_though_others_came_behind_it(rig):
    """They were quick, and so are not in the log."""
    words = rig.memory.control.words
    log_above(words, 1_000_000_000)

    def slow_at_first(end, slot, body):
        if body.endswith(b"slow"):
            words[slot_row(slot) + SLOT_RECEIVED] -= 2_000_000_000
        echo(end, slot, body)

    rig.answer = slow_at_first
    reader, client = Reader(rig), rig.connect()
    rig.pump(lambda: rig.connections == 1)
    words[connection_row(0) + CONNECTION_OPENED] = 1  # long ago
    ask(rig, client, "patient", body=b"slow")
    for size in (0, 1000, 50, 10_000):
        ask(rig, client, "patient", body=bytes(size))
    assert reader.names() == ["patient"]


def test_one_that_went_before_anybody_looked_is_known_by_what_it_left(rig):
    reader, client = Reader(rig), rig.connect()
    ask(rig, client, "brief")
    client.close()
    rig.pump(lambda: not rig.connections)
    assert reader.names() == ["brief"]


def test_nobody_gets_the_name_of_whoever_has_the_row_now(rig):
    reader = Reader(rig)
    for name in ("first", "second"):
        client = rig.connect()
        ask(rig, client, name)
        client.close()
        rig.pump(lambda: not rig.connections)
    # Of the first its row and its bytes are the second's: it may not be called so.
    assert reader.names() == [None, "second"]
    third = rig.connect()
    ask(rig, third, None)
    assert reader.names() == [None]


def test_a_large_request_has_a_name_too_as_long_as_it_is_there(rig):
    reader, client = Reader(rig), rig.connect()
    rig.answer = rig.hold
    header = encode_request_header(ApiKey.METADATA, 9, 1, "large")
    client.send(frame(header + bytes(200_000)))
    rig.pump(lambda: rig.held)
    rig.release()
    rig.pump(client.frames)
    assert reader.names() == ["large"]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\xff\xff", None),
        (b"\x00\x02\xff\xfe", "\ufffd\ufffd"),
        (b"\x01\x00" + b"x" * 256, "x" * 255 + "..."),
        (b"\x00\xff" + b"x" * 255, "x" * 255),
        (b"\x00\x09cut", None),
        (b"\x7f\xff", None),
        (b"\x00", None),
        (b"", None),
    ],
)
def test_whatever_stands_there_is_told_as_text(rig, sent, told):
    reader, client = Reader(rig), rig.connect()
    client.send(frame(b"\0\x03\0\x09\0\0\0\x01" + sent))
    rig.pump(client.frames)
    assert reader.names() == [told]
