"""A broker's life from outside: start, signals, stop, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.inspect.attach import attach
from mpbroker.ipc.layout import HANDLER_BUSY_SLOT, handler_row
from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    EntityData,
    EntryData,
    OpData,
)
from mpbroker.protocol.messages.metadata import MetadataRequest
from tests.broker.load import (
    Load,
    api_versions,
    ask,
    children,
    create_topic,
    dial,
    frame,
    produce_body,
    read_log,
    receive_frame,
)
from tests.broker.test_dynamic_configs import limits_of
from tests.supervisor.test_kills import fetch_body
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until


def test_a_broker_that_was_asked_to_stop_leaves_nothing(make_broker):
    broker = make_broker()
    name = f"/mpbroker-{broker.pid}-{start_time(broker.pid)}"
    assert read_telemetry(name)["pid"] == broker.pid
    broker.stop()  # which looks for processes and names
    assert read_telemetry(name) is None


def test_a_stop_is_told_in_the_log_with_its_cause(make_broker):
    def last_lines(broker):
        lines = broker.log_path.read_text().splitlines()
        return [line.rpartition(": ")[2] for line in lines[-2:]]

    signalled = make_broker()
    signalled.stop()
    assert last_lines(signalled) == ["SIGTERM", "stopped"]
    asked = make_broker()
    with ControlClient(str(asked.data_dir / "control.sock"), 30) as control:
        control.request("stop")
        wait_until(lambda: not asked.is_running)
    asked.kill()  # which only waits for what has ended
    assert last_lines(asked) == ["asked for through the control socket", "stopped"]


def test_connections_that_are_held_for_their_rate_end_with_the_broker(make_broker):
    """Held by the acceptor for up to an hour, which no stop waits for."""
    broker = make_broker({"quota.window.size.seconds": 3600})
    entity = EntityData(entity_type="ip", entity_name="127.0.0.1")
    op = OpData(key="connection_creation_rate", value=0.0, remove=False)
    request = AlterClientQuotasRequest(
        entries=[EntryData(entity=[entity], ops=[op])], validate_only=False
    )
    with dial(broker) as served:
        before = limits_of(broker)
        ask(served, ApiKey.ALTER_CLIENT_QUOTAS, 1, request.encode(1))
        wait_until(lambda: limits_of(broker) != before)
        held = [dial(broker) for _ in range(3)]
        wait_until(lambda: "its quota connection_creation_rate" in broker.log_tail())
        assert api_versions(served)
        assert not select.select(held, [], [], 0)[0]
        broker.stop()
        for sock in (served, *held):
            with sock, contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


def test_asked_to_stop_again_and_again_it_stops_in_order(make_broker):
    """In the interpreter's last moments too."""
    broker = make_broker()
    pidfd = os.pidfd_open(broker.pid)

    def insist() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while True:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                time.sleep(0.0002)

    impatient = threading.Thread(target=insist)
    impatient.start()
    try:
        broker.stop()
    finally:
        impatient.join()
        os.close(pidfd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_on_a_signal_to_it_and_to_its_whole_group(make_broker, number):
    """A Ctrl-C reaches all of them; the supervisor decides who ends when."""
    broker = make_broker()
    with dial(broker) as sock:
        api_versions(sock)
        os.killpg(broker.pid, number)
        assert sock.recv(1) == b""
        wait_until(lambda: not broker.is_running)
    assert "died" not in broker.log_tail()
    broker.kill()
    assert broker._footprint.left_behind() == []


def test_a_hang_up_does_not_end_it(make_broker):
    broker = make_broker()
    os.kill(broker.pid, signal.SIGHUP)
    with dial(broker) as sock:
        assert api_versions(sock)
    broker.stop()


def test_what_was_acknowledged_before_a_stop_is_there_after_it(make_broker):
    broker = make_broker()
    create_topic(broker)
    with Load(broker, 4) as load:
        load.run(100)
    broker.stop()
    load.verify(read_log(broker.data_dir))
    broker.start()
    with Load(broker, 4) as more:
        more.numbers = iter(range(10**6, 10**7))
        more.run(10)
        assert min(more.acknowledged.values()) >= len(load.acknowledged)
    broker.stop()


def test_a_stop_does_not_wait_for_fetches_that_wait(make_broker):
    """Nor does it leave them unanswered."""
    broker = make_broker()
    create_topic(broker)
    with dial(broker) as sock:
        sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(2**31 - 1), 7))
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(90)
        broker.stop()
        assert receive_frame(sock)[:4] == b"\0\0\0\x07"
    assert "killed" not in broker.log_tail()


def test_a_stop_does_not_wait_for_a_handler_that_never_answers(make_broker):
    """Its client is hung up on when the drain's time is over, and it is killed."""
    broker = make_broker({"control.inject.enable": "true", "num.io.threads": 1})
    minute = 60_000  # longer than any stop may take
    with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
        client.request("inject", fault="slow", role="handler", id=0, value=minute)
    with dial(broker) as sock:
        request = MetadataRequest(topics=None).encode(8)
        sock.sendall(frame(ApiKey.METADATA, 8, request))
        memory = attach(broker.pid)
        assert memory is not None
        busy = handler_row(0) + HANDLER_BUSY_SLOT
        wait_until(lambda: memory.control[busy] != 0)
        broker.stop()
        assert sock.recv(1) == b""
    killed = [line for line in broker.log_tail().splitlines() if "killed" in line]
    assert any("handler 0" in line for line in killed), broker.log_tail()


def test_two_brokers_do_not_meet(make_broker):
    one, other = make_broker(name="one"), make_broker(name="other")
    create_topic(one)
    with dial(one) as sock:
        ask(sock, ApiKey.PRODUCE, 9, produce_body(b"mine"))
    assert not set(children(one).values()) & set(children(other).values())
    other.stop()
    with dial(one) as sock:
        assert api_versions(sock)
    one.stop()
    assert not (other.data_dir / "load-0").exists()


def test_a_second_broker_on_the_same_data_is_refused(make_broker):
    broker = make_broker()
    with pytest.raises(BrokerFailedError, match="exit code"):
        type(broker)(broker.data_dir).start()
    with dial(broker) as sock:
        assert api_versions(sock)


def test_a_port_in_use_ends_the_start_with_one_line(make_broker, tmp_path):
    broker = make_broker()
    second = subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "serve"),
            f"listeners=PLAINTEXT://{broker.bootstrap}",
            f"log.dirs={tmp_path / 'second'}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode != 0
    last = second.stderr.strip().splitlines()[-1]
    assert broker.bootstrap in last and "Address already in use" in last
    assert "Traceback" not in second.stderr


def titles_of(broker: Broker) -> list[str]:
    """What `ps` calls a broker's children."""
    titles = []
    for pid in children(broker).values():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            titles.append(file.read().rstrip(b"\0").decode())
    return titles


def test_every_process_is_called_what_kafka_calls_its_threads(make_broker):
    broker = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    port = broker.bootstrap.rpartition(":")[2]
    # An acceptor's backlog is served from before it runs, and so before it has a title.
    for title in (
        f"data-plane-kafka-socket-acceptor-ListenerName(PLAINTEXT)-PLAINTEXT-{port}",
        "data-plane-kafka-request-handler-1",
    ):
        wait_until(lambda t=title: any(t in found for found in titles_of(broker)))


# -- in the background --------------------------------------------------------------


def test_a_daemon_serves_when_its_caller_returns_and_holds_nothing_of_it(tmp_path):
    """subprocess.run reads the output to its end: a daemon that kept it would hang."""
    pid_file = tmp_path / "pid"
    started = subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "serve", "--daemon"),
            *("--pid-file", str(pid_file)),
            "listeners=PLAINTEXT://127.0.0.1:0",
            f"log.dirs={tmp_path / 'data'}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    pid = int(pid_file.read_text())
    try:
        state = read_telemetry(f"/mpbroker-{pid}-{start_time(pid)}")
        host, _, port = state["listeners"]["PLAINTEXT"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            assert api_versions(sock)
        assert os.getsid(pid) != os.getsid(0)
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not start_time(pid))
    assert not pid_file.exists()


def test_a_daemon_that_cannot_start_says_why_to_its_caller(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = subprocess.run(
            [
                *(sys.executable, "-m", "mpbroker", "serve", "--daemon"),
                f"listeners=PLAINTEXT://127.0.0.1:{port}",
                f"log.dirs={tmp_path / 'data'}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert started.returncode == 1
    assert str(port) in started.stderr and "already in use" in started.stderr


def test_the_ready_descriptor_gets_one_line_and_ends(tmp_path):
    """Read to its end: no child keeps it open."""
    reader, writer = os.pipe()
    broker = subprocess.Popen(
        [
            *(sys.executable, "-m", "mpbroker", "serve", "--ready-fd", str(writer)),
            "listeners=PLAINTEXT://127.0.0.1:0",
            f"log.dirs={tmp_path / 'data'}",
        ],
        pass_fds=[writer],
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            (line,) = pipe.read().splitlines()
        assert json.loads(line)["pid"] == broker.pid
    finally:
        broker.terminate()
        assert broker.wait(30) == 0


def test_a_broker_whose_children_never_serve_gives_up_and_leaves_nothing(tmp_path):
    broker = Broker(
        tmp_path / "data",
        command=[sys.executable, "-m", "tests.supervisor.upgrade.never_ready"],
    )
    with pytest.raises(BrokerFailedError, match="exit code 1"):
        broker.start()
    assert not broker.processes()
    broker.kill()


def test_a_listener_may_have_processors_of_its_own_number(make_broker):
    broker = make_broker(
        {
            "listeners": "PLAINTEXT://127.0.0.1:0,OTHER://127.0.0.1:0",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
            "num.network.threads": 1,
            "listener.name.other.num.network.threads": 3,
        }
    )
    titles = titles_of(broker)
    for listener, processors in (("PLAINTEXT", 1), ("OTHER", 3)):
        title = f"network-thread-1-ListenerName({listener})"
        assert sum(title in found for found in titles) == processors


def test_more_processors_than_can_run_are_refused(tmp_path):
    broker = Broker(tmp_path / "data", {"num.network.threads": 65})
    with pytest.raises(BrokerFailedError, match="between 1 and 64"):
        broker.start()
    broker.kill()
