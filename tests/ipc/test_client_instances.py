"""Clients that push metrics: remembered by all handlers while they are there."""

from __future__ import annotations

import itertools
import os
import random
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.tables import client_instances
from mpbroker.ipc.tables.client_instances import PROBES, ClientInstances
from tests.support.children import fork, kill_at_line

FILES = ("mpbroker/ipc/tables/client_instances.py",)
NAMES = ("asked_ns", "pushed_ns", "refusal", "is_terminating")


class Connections:
    """Which connections there are: a cookie by number."""

    def __init__(self):
        self.cookies = {}

    def is_open(self, connection, cookie):
        return self.cookies.get(connection) == cookie


@pytest.fixture
def connections():
    return Connections()


@pytest.fixture
def segment():
    made = ClientInstances.create_segment()
    yield made
    os.close(made.fd)


def note(table, instance, values, *, connection=3, cookie=77, now_ns=1):
    with table.held(instance, connection, cookie, now_ns) as client:
        for name, value in zip(NAMES, values, strict=True):
            setattr(client, name, value)


def known(table, instance, *, connection=3, cookie=77, now_ns=2):
    with table.held(instance, connection, cookie, now_ns) as client:
        return tuple(getattr(client, name) for name in NAMES)


NEW = (0, 0, 0, False)
SEGMENT = ClientInstances.create_segment()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.binary(min_size=16, max_size=16).filter(any),
            st.tuples(
                st.integers(0, 2**62),
                st.integers(0, 2**62),
                st.integers(0, 200),
                st.booleans(),
            ),
        ),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_what_one_handler_notes_the_other_knows(steps):
    connections = Connections()
    connections.cookies[3] = 77
    tables = [ClientInstances(SEGMENT, connections.is_open) for _ in range(2)]
    last = {}
    for which, instance, values in steps:
        note(tables[which], instance, values)
        last[instance] = values
        assert known(tables[not which], instance) == values
    for instance, values in last.items():
        assert known(tables[0], instance) == values


def test_a_client_is_forgotten_with_its_connection(segment, connections):
    table = ClientInstances(segment, connections.is_open)
    connections.cookies = {3: 77, 4: 78}
    note(table, b"i" * 16, (5, 6, 7, True))
    # By another connection, while the one it came by is there: it is the same client.
    assert known(table, b"i" * 16, connection=4, cookie=78) == (5, 6, 7, True)
    connections.cookies = {3: 77, 4: 99}  # the row is another connection's by now
    assert table.count() == 0
    assert known(table, b"i" * 16, connection=3, cookie=77) == NEW
    assert table.count() == 1


def test_what_was_noted_before_a_refusal_is_kept(segment, connections):
    table = ClientInstances(segment, connections.is_open)
    connections.cookies[3] = 77

    def refuse():
        with table.held(b"i" * 16, 3, 77, 1) as client:
            client.refusal = 117
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        refuse()
    assert known(table, b"i" * 16) == (0, 0, 117, False)


def test_clients_that_invent_ids_only_push_out_one_another(
    segment, connections, monkeypatch
):
    monkeypatch.setattr(client_instances, "MAX_INSTANCES", PROBES)
    table = ClientInstances(segment, connections.is_open)
    connections.cookies[3] = 77
    ids = [random.Random(number).randbytes(16) for number in range(3 * PROBES)]
    for now_ns, instance in enumerate(ids, 1):
        note(table, instance, (now_ns, 0, 0, False), now_ns=now_ns)
    assert table.evicted == 2 * PROBES
    assert table.count() == PROBES
    for now_ns, instance in list(enumerate(ids, 1))[-PROBES:]:
        assert known(table, instance, now_ns=1000)[0] == now_ns


def test_whoever_is_killed_at_any_line_leaves_a_table_that_others_use(
    segment, connections
):
    connections.cookies[3] = 77
    seen = set()
    for line in itertools.count(1):
        instance = b"dies at %08d" % line

        def work(line=line, instance=instance):
            table = ClientInstances(segment, connections.is_open)
            kill_at_line(line, FILES)
            note(table, instance, (5, 6, 7, True))

        code = fork(work)
        table = ClientInstances(segment, connections.is_open)
        found = known(table, instance)
        assert found in (NEW, (5, 6, 7, True))
        seen.add(found)
        note(table, instance, (8, 9, 0, False))
        assert known(table, instance) == (8, 9, 0, False)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert line > 20
    assert len(seen) == 2
