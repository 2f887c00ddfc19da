"""The memory of large requests: in use from their first bytes to their answers."""

from __future__ import annotations

import pytest

from mpbroker.exporter.limits import request_memory
from mpbroker.ipc.arena import REQUEST_PAGE_BYTES
from mpbroker.ipc.layout import PROCESSOR_LISTENER, processor_row
from tests.network.rig import Rig, frame
from tests.support.memory import broker_memory


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr("mpbroker.network.processor._IDLE_POLL_S", 0)
    with broker_memory() as memory:
        made = Rig(memory)
        yield made
        made.end()


def figures(rig):
    memory = rig.memory
    family = request_memory(memory.control.words, memory.arena_layout)
    return {dict(labels)["state"]: value for _, labels, value in family.samples}


def test_what_large_requests_use_is_counted_until_they_are_answered(rig):
    words, layout = rig.memory.control.words, rig.memory.arena_layout
    assert figures(rig) == {"used": 0, "available": 0}
    words[processor_row(0) + PROCESSOR_LISTENER] = 1
    words[processor_row(1) + PROCESSOR_LISTENER] = 1
    everything = 2 * layout.extents_bytes
    assert figures(rig) == {"used": 0, "available": everything}
    rig.answer = rig.hold
    small, large, half = (rig.connect() for _ in range(3))
    small.send(frame(b"small"))
    large.send(frame(bytes(3 * REQUEST_PAGE_BYTES)))
    half.send(frame(bytes(500_000))[:100_000])
    rig.pump(lambda: len(rig.held) == 2 and half.has_sent)
    rig.turns()
    # Whole pages, with room behind each for what its partitions come to.
    now = figures(rig)
    assert now["used"] == (4 + 9) * REQUEST_PAGE_BYTES
    assert sum(now.values()) == everything
    rig.release()
    rig.pump(large.frames)
    assert figures(rig)["used"] == 9 * REQUEST_PAGE_BYTES
    half.close()
    rig.pump(lambda: rig.connections == 2)
    assert figures(rig) == {"used": 0, "available": everything}
