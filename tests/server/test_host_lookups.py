"""A silent DNS server keeps no handler waiting for long."""

from __future__ import annotations

import socket
import threading

import pytest

from mpbroker.server.host_lookups import HostLookups


class Resolver:
    """In the place of getaddrinfo: silent names wait for ``answers``."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host, port, *, flags=0):
        if flags & socket.AI_NUMERICHOST:
            socket.inet_aton(host)
            return []
        self.asked.append(host)
        if "silent" in host:
            self.answers.wait()
        if "unknown" in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []


@pytest.fixture
def resolver(monkeypatch):
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.answers.set()


def test_addresses_and_hosts_are_told_from_other_texts():
    lookups = HostLookups(patience_s=60)
    hosts = ["127.0.0.1", "::1", "fe80::1%1", "localhost"]
    assert lookups.unknown(hosts) == ()
    assert lookups.unknown([*hosts, "not.there.invalid"]) == ("not.there.invalid",)


@pytest.mark.parametrize(
    "text",
    [
        "two words",
        "a..b",
        "x" * 64,
        "1.2.3.4/24",
        "\0",
        "\ud800",
        ".".join(["x"] * 200),
    ],
)
def test_what_has_not_the_form_of_a_name_is_never_looked_up(resolver, text):
    assert HostLookups().unknown([text, "10.0.0.1"]) == (text,)
    assert resolver.asked == []


def test_a_name_without_an_answer_is_taken_for_a_host(resolver):
    lookups = HostLookups(patience_s=0.01)
    assert lookups.unknown(["silent.unknown.test", "no name"]) == ("no name",)


def test_nothing_is_looked_up_while_the_server_is_silent(resolver):
    lookups = HostLookups(patience_s=0.01)
    lookups.unknown(["silent.test"])
    lookups._patience_s = 3600
    assert lookups.unknown(["unknown.test", "no name"]) == ("no name",)
    assert resolver.asked == ["silent.test"]
    resolver.answers.set()
    lookups._thread.join()
    assert lookups.unknown(["unknown.test"]) == ("unknown.test",)
