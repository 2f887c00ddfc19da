"""Names of hosts in limits of connections, looked up when they are set."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from mpbroker.network.connection_rows import address_words
from mpbroker.supervisor import host_names
from mpbroker.supervisor.host_names import HostNames
from mpbroker.supervisor.loop import Loop

HERE = [address_words(socket.AF_INET, ("127.0.0.1", 0))[0]]
SIX = [address_words(socket.AF_INET6, ("::1", 0, 0, 0))[0]]
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


class Supervisor(Loop):
    """One without children, which must not look up a name itself."""

    children: Sequence[object] = ()


@pytest.fixture
def loop() -> Iterator[Supervisor]:
    made = Supervisor()
    yield made
    made.kill_asides()


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], object]) -> None:
    """Let names be looked up by a function, in any process but this one."""
    ourselves = os.getpid()

    def look_up(host: str, *arguments: object, **options: object) -> object:
        assert os.getpid() != ourselves, "the supervisor waits for a DNS server"
        return answer(host)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def failing(host: str) -> object:
    raise socket.gaierror(socket.EAI_AGAIN, "not just now")


def hanging(host: str) -> object:
    return time.sleep(3600)


def after_look_up(loop: Loop, names: HostNames) -> HostNames:
    """Do as the supervisor's loop does, until the names that are due have an answer."""
    names.look_up(loop)
    (pid,) = loop.asides
    while pid in loop.asides:
        loop.dispatch(0.01)
        if pid in loop.asides:
            names.look_up(loop)
    return names


def test_addresses_are_known_at_once(monkeypatch, loop):
    answering(monkeypatch, hanging)
    names = HostNames()
    found = names.addresses(["127.0.0.1", "::1", "::1%lo"])
    assert found == {"127.0.0.1": HERE, "::1": SIX, "::1%lo": SIX}
    names.look_up(loop)
    assert not loop.asides


def test_a_name_has_its_addresses_when_another_process_has_looked_it_up(
    monkeypatch, loop
):
    answering(monkeypatch, lambda host: FOUND)
    names = HostNames()
    assert names.addresses(["here.example"]) == {"here.example": []}
    assert after_look_up(loop, names).has_news
    for _ in range(2):
        assert names.addresses(["here.example"]) == {"here.example": HERE}
        assert not names.has_news
    names.look_up(loop)
    assert not loop.asides  # once is enough


def test_a_name_that_hangs_keeps_nobody_waiting_and_is_given_up(
    monkeypatch, loop, caplog
):
    answering(monkeypatch, hanging)
    monkeypatch.setattr(host_names, "_PATIENCE_S", 0.0)
    names = HostNames()
    names.addresses(["hangs.example"])
    assert not after_look_up(loop, names).has_news
    assert "hangs.example cannot be looked up (there is no answer)" in caplog.text


def test_one_that_cannot_be_looked_up_hides_no_other_and_is_told_once(
    monkeypatch, loop, caplog
):
    monkeypatch.setattr(host_names, "_RETRY_S", 0.0)
    answering(monkeypatch, lambda host: FOUND if "here" in host else failing(host))
    names, hosts = HostNames(), ["away.example", "here.example"]
    names.addresses(hosts)
    for _ in range(2):
        after_look_up(loop, names)
        assert names.addresses(hosts) == {hosts[0]: [], hosts[1]: HERE}
    assert caplog.text.count("away.example cannot be looked up") == 1


def test_a_name_that_could_not_be_looked_up_is_tried_again(monkeypatch, loop):
    monkeypatch.setattr(host_names, "_RETRY_S", 0.0)
    answering(monkeypatch, failing)
    names = HostNames()
    names.addresses(["here.example"])
    after_look_up(loop, names)
    assert names.addresses(["here.example"]) == {"here.example": []}
    answering(monkeypatch, lambda host: FOUND)
    after_look_up(loop, names)
    assert names.addresses(["here.example"]) == {"here.example": HERE}


def test_a_name_that_no_limit_names_any_more_is_looked_up_when_it_is_set_again(
    monkeypatch, loop
):
    answering(monkeypatch, lambda host: FOUND)
    names = HostNames()
    names.addresses(["here.example"])
    after_look_up(loop, names)
    names.addresses([])
    assert names.addresses(["here.example"]) == {"here.example": []}
    names.look_up(loop)
    names.addresses([])  # while it is looked up
    while loop.asides:
        loop.dispatch(1.0)
    assert not names.has_news


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_who_had_no_descriptor_to_ask_with_asks_again(monkeypatch, loop, number):
    answering(monkeypatch, lambda host: FOUND)
    names = HostNames()
    names.addresses(["here.example"])

    def full(name: str) -> int:
        raise OSError(number, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", full)
        with pytest.raises(OSError, match="Too many"):
            names.look_up(loop)
    assert after_look_up(loop, names).has_news


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".example", "\u2028"])
def test_what_no_host_can_be_called_has_no_address(name, loop, caplog):
    names = HostNames()
    names.addresses([name])
    after_look_up(loop, names)
    assert names.addresses([name]) == {name: []}
    assert "a quota for it has no effect" in caplog.text
