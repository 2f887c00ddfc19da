"""One process is replaced by another that is ready first, and no client notices."""

from __future__ import annotations

import os

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from tests.broker.load import (
    Load,
    api_versions,
    children,
    create_topic,
    dial,
    read_log,
    states,
)
from tests.support.children import wait_until


def restart(broker, role, number):
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0) as client:
        return client.request("restart", role=role, id=number)


@pytest.fixture
def broker(make_broker):
    made = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    create_topic(made)
    return made


def wait_for_successor(broker, role, pid):
    def replaced():
        found = [child for child in states(broker) if child["role"] == role]
        return pid not in {child["pid"] for child in found} and {
            child["state"] for child in found
        } == {"READY"}

    wait_until(replaced)


def test_handlers_are_replaced_under_load_and_nobody_notices(broker):
    with Load(broker, 8) as load:
        for _ in range(4):
            (_, number), pid = next(iter(children(broker, "handler").items()))
            restart(broker, "handler", number)
            load.run(50)
            wait_for_successor(broker, "handler", pid)
            assert len(children(broker, "handler")) == 2
        load.run(20)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_processors_are_replaced_under_load_and_nobody_is_disconnected(broker):
    with Load(broker, 8) as load:
        for _ in range(4):
            ((_, number), pid) = next(iter(children(broker, "processor").items()))
            restart(broker, "processor", number)
            load.run(50)
            wait_for_successor(broker, "processor", pid)
        load.run(20)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_an_acceptor_is_replaced_and_refuses_nobody(broker):
    for _ in range(3):
        pid = children(broker)["acceptor", 0]
        restart(broker, "acceptor", 0)
        while pid in children(broker).values():
            with dial(broker) as sock:
                assert api_versions(sock)
    assert "died" not in broker.log_tail()
