"""What the service manager passes in and is told, with a real broker in between."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.supervisor import systemd
from mpbroker.supervisor.systemd import ServiceManager, take_inherited_sockets
from tests.broker.load import api_versions, children, dial
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.notify_socket import NotifySocket


@pytest.fixture
def manager(tmp_path):
    with NotifySocket(tmp_path / "notify") as made:
        yield made


def watched(manager, watchdog_s=None):
    """What a broker under this manager has in its environment."""
    environ = {"NOTIFY_SOCKET": manager.address}
    if watchdog_s is not None:
        environ["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
    return environ


def is_ready(states):
    return states.get("READY") == "1"


def is_refused(broker):
    try:
        dial(broker).close()
    except ConnectionRefusedError:
        return True
    return False


def is_fed(states):
    return states.get("WATCHDOG") == "1"


# -- the protocol -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_states_are_sent_to_the_notify_socket(tmp_path, kind):
    with NotifySocket(tmp_path / "notify" if kind == "file" else None) as other_end:
        us = ServiceManager({"NOTIFY_SOCKET": other_end.address})
        assert us.tell("READY=1", "STATUS=so far")
        assert other_end.next() == {"READY": "1", "STATUS": "so far"}


@pytest.mark.parametrize(
    "address", ["", "relative", "/no/such/socket", "/" + "x" * 200]
)
def test_without_a_notify_socket_nothing_is_sent_and_nothing_fails(address):
    us = ServiceManager({"NOTIFY_SOCKET": address})
    assert not us.tell("READY=1", wait=True)
    assert not us.keep("name", 0)
    assert not ServiceManager({}).is_there


def test_a_manager_that_does_not_read_is_not_waited_for(manager):
    us = ServiceManager({"NOTIFY_SOCKET": manager.address})
    while us.tell("STATUS=again"):
        pass  # until its queue is full
    assert not us.tell("STATUS=and again")
    manager.drain()
    assert us.tell("STATUS=after all")


def test_the_watchdog_is_for_the_process_that_it_names():
    usec = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000"}
    assert ServiceManager(usec).watchdog_s == 3.0
    assert ServiceManager(usec | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 3.0
    assert ServiceManager(usec | {"WATCHDOG_PID": "1"}).watchdog_s == 0.0
    for text in ("", "0", "-5", "many"):
        assert ServiceManager(usec | {"WATCHDOG_USEC": text}).watchdog_s == 0.0
    assert ServiceManager({"WATCHDOG_USEC": "3000000"}).watchdog_s == 0.0


# -- a broker's life ----------------------------------------------------------------


def test_it_is_ready_when_a_request_has_come_through_and_not_before(manager, tmp_path):
    """Every process says that it serves, and no handler answers."""
    answering = tmp_path / "answering"
    broker = Broker(
        tmp_path / "data",
        environ=watched(manager) | {"ANSWER_WHEN_THERE": str(answering)},
        command=[sys.executable, "-m", "tests.inspect.unanswering"],
    )

    def look_on():
        try:
            # A second passes, in which one that asked nobody would have been ready.
            for _ in range(2):
                manager.wait_for(lambda states: states.get("STATUS") == "Starting")
            assert not any(map(is_ready, manager.heard))
        finally:
            answering.touch()

    # Not the other way round: a broker dies with the thread that started it.
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look_on)
        with broker:
            looked.result()
            ready = manager.wait_for(is_ready)
            assert ready["STATUS"].startswith("Serving PLAINTEXT on ")
    for states in manager.heard[1:-1]:
        assert int(states.get("EXTEND_TIMEOUT_USEC", "0")) > 1_000_000
    assert manager.wait_for(lambda states: states.get("STOPPING") == "1")


def test_the_first_word_is_how_long_a_recovery_may_take(manager, tmp_path):
    with Broker(tmp_path / "data", environ=watched(manager)):
        assert int(manager.next()["EXTEND_TIMEOUT_USEC"]) >= 60_000_000


@pytest.mark.parametrize("role", ["acceptor", "processor", "handler"])
def test_the_watchdog_is_fed_by_requests_and_so_by_every_stage(manager, tmp_path, role):
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 1, "num.io.threads": 1},
        environ=watched(manager, watchdog_s=0.5),
    )
    with broker:
        manager.wait_for(is_ready)
        for _ in range(2):
            manager.wait_for(is_fed)
        # Its lease ends after a second or two, and it is replaced: on a busy machine
        # before requests have failed. Then nothing was seen, and another is stopped.
        while not starves(broker, manager, role):
            manager.wait_for(is_fed)
        manager.wait_for(is_fed)


def failures(broker) -> int:
    """How many requests of the broker to itself have failed so far."""
    return broker.log_path.read_text(errors="replace").count("to itself failed")


def starves(broker, manager, role) -> bool:
    """Stop a process; whether requests failed twice before it was replaced.

    If so, the watchdog was not fed in between.
    """
    ((_, pid),) = wait_until(lambda: children(broker, role)).items()
    before = failures(broker)
    os.kill(pid, signal.SIGSTOP)
    try:
        for more in (1, 2):
            wait_until(
                lambda n=before + more: (
                    failures(broker) >= n or pid not in children(broker, role).values()
                )
            )
            if more == 1:
                manager.drain()  # what was said before the first failure
        was_fed = any(map(is_fed, manager.drain()))
        if pid not in children(broker, role).values():
            return False
        assert not was_fed
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_request_that_meets_a_death_is_made_again(manager, tmp_path):
    """One killed process must not look like a wedged broker."""
    with Broker(tmp_path / "data", environ=watched(manager, 0.5)) as broker:
        manager.wait_for(is_ready)
        for _ in range(4):
            killed = children(broker)["processor", 0]
            os.kill(killed, signal.SIGKILL)
            manager.wait_for(is_fed)
            wait_until(lambda pid=killed: children(broker)["processor", 0] != pid)


def test_the_status_says_what_is_served_and_what_happened(manager, tmp_path):
    with Broker(tmp_path / "data", environ=watched(manager)) as broker:
        status = manager.wait_for(is_ready)["STATUS"]
        assert broker.bootstrap in status and "0 restarts" in status
        os.kill(children(broker, "handler")["handler", 0], signal.SIGKILL)
        with dial(broker) as sock:
            api_versions(sock)
            manager.wait_for(
                lambda states: "1 connections, 1 restarts" in states.get("STATUS", "")
            )


def test_a_hang_up_reloads_the_settings_and_says_when(manager, tmp_path):
    """As systemd.service(5) wants it: RELOADING=1 with the time, then READY=1."""
    settings = tmp_path / "server.properties"
    settings.write_text("num.io.threads=1\n")
    broker = Broker(
        tmp_path / "data",
        {"--config": settings},  # --config=FILE, among the settings
        environ=watched(manager),
    )
    with broker:
        manager.wait_for(is_ready)
        for text, handlers in (("num.io.threads=3", 3), ("num.io.threads=many", 3)):
            settings.write_text(text)
            before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            os.kill(broker.pid, signal.SIGHUP)
            states = manager.wait_for(lambda states: states.get("RELOADING") == "1")
            assert int(states["MONOTONIC_USEC"]) >= before_us
            assert manager.next() == {"READY": "1"}
            wait_until(lambda n=handlers: len(children(broker, "handler")) == n)
        refusal = "nothing is changed: num.io.threads=many"
        wait_until(lambda: refusal in broker.log_tail())


def test_a_broker_that_drains_is_not_taken_for_a_wedged_one(manager, tmp_path):
    """It refuses new connections on purpose, the watchdog's own among them."""
    broker = Broker(tmp_path / "data", environ=watched(manager, 0.5))
    with broker, dial(broker) as old:
        manager.wait_for(is_ready)
        # Else it may still be in the backlog, and a drain waits for no such one.
        assert api_versions(old)
        path = str(tmp_path / "data" / "control.sock")
        with ControlClient(path, 60) as control:
            control.request("drain", for_s=60)
        wait_until(lambda: is_refused(broker))
        manager.drain()
        manager.wait_for(is_fed)
        # A request that was under way then, on a busy machine, may have failed.
        before = broker.log_tail().count("to itself failed")
        for _ in range(3):
            manager.wait_for(is_fed)
        assert api_versions(old)
        assert broker.log_tail().count("to itself failed") == before


def test_an_upgrade_keeps_the_manager_informed(manager, tmp_path):
    """It is the same process all the time, and so the same main process."""
    with Broker(tmp_path / "data", environ=watched(manager, 5.0)) as broker:
        manager.wait_for(lambda states: "FDSTORE" in states)
        with dial(broker) as old:
            with ControlClient(str(tmp_path / "data" / "control.sock"), 30) as control:
                control.request("upgrade")
            states = manager.wait_for(is_ready)
            assert broker.bootstrap in states["STATUS"]
            manager.wait_for(is_fed)
            assert api_versions(old)
        assert not any("STOPPING" in states for states in manager.heard)
        assert set(manager.stored) == {"stored-PLAINTEXT"}


# -- sockets that come with the start -----------------------------------------------


class Activated(Broker):
    """A broker that is passed sockets, each under a name."""

    def pass_sockets(self, *sockets):
        self.pass_fds = [fd for _, fd in sockets]
        self._command = [
            *(sys.executable, "-m", "tests.broker.activated"),
            ",".join(f"{name}={fd}" for name, fd in sockets),
        ]


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def port_of(sock):
    return sock.getsockname()[1]


@pytest.mark.parametrize("name", ["PLAINTEXT", "plaintext", "mpbroker.socket"])
def test_a_socket_units_socket_is_used_by_name_or_address(tmp_path, listening, name):
    port = port_of(listening)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as early:
        broker = Activated(
            tmp_path / "data", {"listeners": f"PLAINTEXT://127.0.0.1:{port}"}
        )
        broker.pass_sockets((name, listening.fileno()))
        with broker:
            assert broker.bootstrap == f"127.0.0.1:{port}"
            assert api_versions(early)  # who dialled before there was a broker


def test_of_a_socket_found_by_name_the_unit_chose_the_address(tmp_path, listening):
    broker = Activated(tmp_path / "data", {"listeners": "PLAINTEXT://127.0.0.1:9092"})
    broker.pass_sockets(("PLAINTEXT", listening.fileno()))
    with broker:
        assert broker.bootstrap == f"127.0.0.1:{port_of(listening)}"
        assert "set listeners alike" in broker.log_tail()


def test_a_passed_socket_that_nobody_would_serve_ends_the_start(tmp_path, listening):
    broker = Activated(tmp_path / "data")
    broker.pass_sockets(("other.socket", listening.fileno()))
    with pytest.raises(BrokerFailedError, match=r"no listener for the socket other"):
        broker.start()


def test_no_connection_is_refused_while_the_broker_restarts(manager, tmp_path):
    """Its sockets are in the manager's store, even when all of it was killed."""
    broker = Activated(tmp_path / "data", environ=watched(manager))
    broker.pass_sockets()
    broker.start()
    manager.wait_for(lambda states: "FDSTORE" in states)
    address = broker.bootstrap
    for end in (broker.stop, broker.kill):
        end()
        with dial(broker) as waiting:  # which nobody accepts
            broker.pass_sockets(*manager.stored.items())
            broker.start()
            assert broker.bootstrap == address  # though port 0 is any port
            assert api_versions(waiting)
    broker.stop()


def test_a_stored_socket_whose_address_is_served_no_more_is_given_up(
    manager, tmp_path, listening
):
    """Or it would listen there for ever, and its clients wait as long."""
    manager.stored["stored-PLAINTEXT"] = os.dup(listening.fileno())
    manager.stored["stored-GONE"] = os.dup(listening.fileno())
    broker = Activated(
        tmp_path / "data",
        {"listeners": "PLAINTEXT://127.0.0.2:0"},
        environ=watched(manager),
    )
    broker.pass_sockets(*manager.stored.items())
    with broker:
        manager.wait_for(lambda states: "FDSTORE" in states)
        assert set(manager.stored) == {"stored-PLAINTEXT"}
        with socket.socket(fileno=os.dup(manager.stored["stored-PLAINTEXT"])) as kept:
            assert kept.getsockname()[0] == "127.0.0.2"


def test_sockets_passed_to_another_process_are_left_alone():
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert take_inherited_sockets(environ) == []
    assert environ == {}  # nor are they told to anybody we start


@pytest.mark.parametrize("count", ["", "-1", "two", "\u0663"])
def test_a_number_of_sockets_that_is_none_is_none(count):
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}
    assert take_inherited_sockets(environ) == []


def _not_listening():
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _datagrams():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _unix():
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_not_listening, "Accept=no"),
        (_datagrams, "no stream socket of TCP or Unix"),
        (_unix, "Accept=no"),
    ],
)
def test_what_is_passed_must_be_a_listening_stream_socket(monkeypatch, make, message):
    with make() as made:
        fd = os.dup(made.fileno())
        monkeypatch.setattr(systemd, "_FIRST_FD", fd)
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        with pytest.raises(ConfigError, match=message):
            take_inherited_sockets(environ)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)  # ours to close, and closed


def test_a_descriptor_that_is_not_open_is_told(monkeypatch):
    fd = os.dup(0)
    os.close(fd)
    monkeypatch.setattr(systemd, "_FIRST_FD", fd)
    with pytest.raises(ConfigError, match=rf"descriptor {fd} \(x\) is not a socket"):
        take_inherited_sockets(
            {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
        )
