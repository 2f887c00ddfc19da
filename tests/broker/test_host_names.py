"""Names of hosts in limits of connections, looked up when they are set."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace

import pytest

from mpbroker.network.connection_rows import address_words
from mpbroker.supervisor.live_config import HostNames, LiveConfig

HERE = [address_words(socket.AF_INET, ("127.0.0.1", 0))[0]]


def failing(monkeypatch, error):
    def look_up(*arguments, **options):
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_name_keeps_its_addresses_while_nobody_can_look_it_up(monkeypatch, caplog):
    names = HostNames()
    assert names.addresses("127.0.0.1") == HERE
    failing(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "not just now"))
    assert names.addresses("127.0.0.1") == HERE
    assert names.addresses("elsewhere.example") == []
    assert "elsewhere.example" in caplog.text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_who_had_no_descriptor_to_ask_with_asks_again(monkeypatch, number):
    live = LiveConfig.__new__(LiveConfig)
    live._registry = SimpleNamespace(catch_up=lambda: None, version=7)
    live._version, live._host_names = 6, HostNames()
    found = []
    live._apply = lambda supervisor: found.append(
        live._host_names.addresses("127.0.0.1")
    )
    with monkeypatch.context() as patch:
        failing(patch, OSError(number, "Too many open files"))
        live.turn(None)
        live.turn(None)
    for _ in range(3):
        live.turn(None)
    assert found == [[], [], HERE]


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".example", "\u2028"])
def test_what_no_host_can_be_called_has_no_address(name, caplog):
    assert HostNames().addresses(name) == []
    assert "a quota for it has no effect" in caplog.text
