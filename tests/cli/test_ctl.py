"""`mpbroker ctl` and real brokers: that serve, hang, or have been killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from mpbroker.cli.ctl.ctl_connection import BrokerUnavailableError, ControlClient
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.inspect.process_state import process_state
from mpbroker.ipc.named_segment import start_time
from mpbroker.producer import Producer
from tests.support.broker import Broker
from tests.support.children import wait_until

QUICK = {"num.io.threads": 2, "num.network.threads": 1}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A broker for tests that only look."""
    with Broker(tmp_path_factory.mktemp("calm") / "data", QUICK) as broker:
        yield broker


@pytest.fixture
def ctl(mpbroker):
    """Runs `mpbroker ctl` against one broker; the result has the JSON parsed."""

    def run(broker, command, *arguments, timeout=60):
        return mpbroker(
            "ctl",
            command,
            *arguments,
            "--data-dir",
            broker.data_dir,
            "--timeout",
            timeout,
        )

    return run


@pytest.fixture
def ask(ctl):
    def run(broker, command, *arguments, code=ExitCode.OK, timeout=60):
        result = ctl(broker, command, "--json", *arguments, timeout=timeout)
        assert result.code == code, result.err
        return json.loads(result.out)

    return run


def test_ctl_takes_the_format_as_all_other_commands(calm, ctl):
    for arguments in (("--format", "json"), ("--json",), ("--json", "--format=text")):
        result = ctl(calm, "status", *arguments)
        assert json.loads(result.out)["phase"] == "SERVING"
    text = ctl(calm, "status", "--format", "text").out
    assert text and not text.startswith(b"{")


def produce(mpbroker, broker, count, acks="1", topic="t"):
    lines = b"".join(b"%d\n" % number for number in range(count))
    result = mpbroker(
        "produce", "-t", topic, "-b", broker.bootstrap, "--acks", acks, stdin=lines
    )
    assert result.code == 0, result.err


@contextlib.contextmanager
def producing(broker, acks="1"):
    """A client that produces one record beside us."""
    command = [sys.executable, "-m", "mpbroker", "produce", "-t", "t"]
    client = subprocess.Popen(
        [*command, "-b", broker.bootstrap, "--acks", acks], stdin=subprocess.PIPE
    )
    client.stdin.write(b"one\n")
    client.stdin.close()
    try:
        yield client
    finally:
        client.kill()
        client.wait()


def processes(state, role):
    return [each for each in state["processes"] if each["role"] == role]


# -- status --------------------------------------------------------------------------


def test_status_tells_who_serves_and_what_is_not_on_disk(
    make_broker, mpbroker, ctl, ask
):
    broker = make_broker(QUICK)
    state = ask(broker, "status")
    assert state["supervisor"] == "answers" and state["phase"] == "SERVING"
    assert state["pid"] == broker.pid and state["listeners"] == broker.listeners
    assert len(processes(state, "handler")) == 2
    told = {"role", "id", "pid", "busy_ms", "apis", "requests", "parked", "syncs"}
    told |= {"idle_ns", "parked_fetches", "sessions_refused"}
    assert state["handlers"][0].keys() == told
    assert {each["pid"] for each in state["processes"]} <= set(broker.processes())
    assert state["power_cut"]["partitions"] == 0

    produce(mpbroker, broker, 100)
    cut = ask(broker, "status")["power_cut"]
    (worst,) = cut["worst"]
    assert (worst["topic"], worst["partition"], worst["records"]) == ("t", 0, 100)
    assert cut["bytes"] > 200
    wait_until(lambda: ask(broker, "status")["power_cut"]["oldest_s"] is not None)

    produce(mpbroker, broker, 10, acks="all")  # a sync covers what came before it
    assert ask(broker, "status")["power_cut"]["records"] == 0

    text = ctl(broker, "status")
    assert text.code == 0 and text.err == ""
    assert b"SERVING" in text.out and b"not on disk  nothing" in text.out
    quiet = ctl(broker, "status", "--quiet")
    assert (quiet.code, quiet.out) == (0, b"")


def test_the_only_broker_is_found_without_a_name_and_of_two_one_must_be_named(
    make_broker, mpbroker, monkeypatch
):
    first, second = make_broker(QUICK), make_broker(QUICK, name="other")
    result = mpbroker("ctl", "status")
    assert result.code == ExitCode.USAGE
    assert str(first.data_dir) in result.err and str(second.data_dir) in result.err
    path = first.data_dir / "control.sock"
    assert mpbroker("ctl", "status", "--socket", path).code == 0
    monkeypatch.setenv("MPBROKER_CONTROL_SOCKET_PATH", str(path))
    assert mpbroker("ctl", "status", "--quiet").code == 0
    second.stop()
    monkeypatch.delenv("MPBROKER_CONTROL_SOCKET_PATH")
    result = mpbroker("ctl", "status", "--quiet")
    # Another test's broker may run beside us.
    assert result.code == 0 or "brokers run here" in result.err


def test_a_directory_that_no_broker_serves_is_unavailable(mpbroker, tmp_path):
    result = mpbroker("ctl", "status", "--data-dir", tmp_path)
    assert result.code == ExitCode.UNAVAILABLE
    assert "no broker serves" in result.err
    result = mpbroker("ctl", "status", "--socket", tmp_path / "none.sock")
    assert result.code == ExitCode.UNAVAILABLE
    assert "No such file" in result.err


def test_the_socket_is_where_the_setting_or_the_service_manager_says(
    tmp_path, mpbroker
):
    runtime = tmp_path / "run"
    runtime.mkdir()
    broker = Broker(
        tmp_path / "data", QUICK, environ={"RUNTIME_DIRECTORY": str(runtime)}
    )
    with broker:
        assert (runtime / "control.sock").is_socket()
        assert mpbroker("ctl", "status", "-q", "-d", broker.data_dir).code == 0
    assert list(runtime.iterdir()) == []
    named = tmp_path / "named.sock"
    with Broker(tmp_path / "data", {**QUICK, "control.socket.path": named}):
        assert mpbroker("ctl", "status", "-q", "--socket", named).code == 0
    assert not named.exists()


# -- a supervisor that does not answer -------------------------------------------------


def test_who_serves_every_address_is_said_to(make_broker, ctl, ask):
    broker = make_broker({**QUICK, "listeners": "PLAINTEXT://0.0.0.0:0"})
    state = ask(broker, "status")
    port = int(state["listeners"]["PLAINTEXT"].rpartition(":")[2])
    assert state["listeners"] == {"PLAINTEXT": f"127.0.0.1:{port}"}  # to be dialled
    assert b"listener     PLAINTEXT on 0.0.0.0:%d\n" % port in ctl(broker, "status").out
    assert f"serving PLAINTEXT on 0.0.0.0:{port}\n" in broker.log_path.read_text()


def test_a_stopped_supervisor_silences_neither_status_nor_the_rest(
    make_broker, mpbroker, ctl, ask
):
    broker = make_broker(QUICK)
    produce(mpbroker, broker, 50)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        state = ask(broker, "status", code=ExitCode.UNAVAILABLE, timeout=0.3)
        assert state["supervisor"] == "stopped" and state["phase"] == "SERVING"
        (worst,) = state["power_cut"]["worst"]
        assert (worst["topic"], worst["records"]) == ("t", 50)
        assert sum(each["requests"] for each in state["handlers"]) > 0
        text = ctl(broker, "status", timeout=0.3)
        assert "is stopped" in text.err and b"handler" in text.out
        assert ctl(broker, "status", "-q", timeout=0.3).code == ExitCode.UNAVAILABLE
        top = ctl(broker, "top", "--once", timeout=0.3)
        assert top.code == 0 and b"does not answer" in top.out
        box = json.loads(ctl(broker, "blackbox", "--json", "--living", timeout=0.3).out)
        assert {"SPAWNED", "SERVING"} == {
            event["event"]
            for each in box["living"]
            if each["role"] == "handler"
            for event in each["events"]
        }
        refused = ctl(broker, "resize", "--handlers", "1", timeout=0.3)
        assert refused.code == ExitCode.UNAVAILABLE
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    # What nobody waited for any more is not done.
    assert len(processes(ask(broker, "status"), "handler")) == 2


def test_a_killed_broker_tells_what_it_published_last(make_broker, ctl, ask):
    broker = make_broker(QUICK)
    (victim, *_) = processes(ask(broker, "status"), "handler")
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: ask(broker, "status")["deaths"] == 1)
    name = f"/dev/shm/mpbroker-{broker.pid}-{start_time(broker.pid)}"
    broker.kill()
    status, box = ctl(broker, "status", "--json"), ctl(broker, "blackbox", "--json")
    assert status.code == ExitCode.UNAVAILABLE
    # Any broker that starts on this machine meanwhile, another test's, removes it.
    if os.path.exists(name):
        state = json.loads(status.out)
        assert state["supervisor"] == "dead"
        assert {each["state"] for each in state["processes"]} == {"GONE"}
        deaths = json.loads(box.out)["deaths"]
        assert [(each["pid"], each["reason"]) for each in deaths] == [
            (victim["pid"], "signal 9")
        ]
    broker.start()  # its socket file was left behind
    assert ask(broker, "status")["supervisor"] == "answers"


# -- black boxes ---------------------------------------------------------------------


def test_the_black_box_of_a_killed_handler_names_the_request_it_was_at(
    make_broker, mpbroker, ctl, ask
):
    broker = make_broker(
        {**QUICK, "num.io.threads": 1, "control.inject.enable": "true"}
    )
    produce(mpbroker, broker, 1)
    assert ctl(broker, "inject", "slow", "handler", "0", "--value", "60000").code == 0
    with producing(broker):

        def executing():
            return ask(broker, "status")["handlers"][0]["busy_ms"] > 0

        wait_until(executing)
        assert ctl(broker, "inject", "kill", "handler", "0").code == 0
        (death,) = wait_until(lambda: ask_deaths(ctl, broker))
    assert death["reason"] == "signal 9"
    assert death["request"]["api"] in ("ApiVersions", "Metadata", "Produce")
    assert "127.0.0.1" in death["request"]["connection"]
    assert [each["event"] for each in death["events"]][:2] == ["SPAWNED", "SERVING"]
    text = ctl(broker, "blackbox")
    assert text.code == 0 and b"it was executing" in text.out


def ask_deaths(ctl, broker):
    return json.loads(ctl(broker, "blackbox", "--json").out)["deaths"]


def test_nobody_died_is_not_found(calm, ctl):
    result = ctl(calm, "blackbox")
    assert result.code == ExitCode.NOT_FOUND and b"No process has died" in result.out


def test_faults_are_injected_only_where_that_was_enabled(calm, ctl):
    result = ctl(calm, "inject", "kill", "handler", "0")
    assert result.code == ExitCode.ERROR and "--enable-inject" in result.err


# -- connections, top, doctor --------------------------------------------------------


def test_connections_are_listed_with_who_and_since_when(make_broker, ask, ctl):
    import socket

    broker = make_broker(QUICK)
    host, port = broker.bootstrap.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as client:

        def only_ours():
            # The broker's own, made at its start, may be there for another moment.
            found = json.loads(ctl(broker, "connections", "--json").out)
            names = [(each["peer"], each["port"]) for each in found]
            return found if names == [client.getsockname()] else None

        (found,) = wait_until(only_ours)
        assert found["state"] == "READING" and found["age_s"] >= 0
        assert ctl(broker, "connections", "--state", "sending").code == 10
        assert ctl(broker, "connections", "--peer", "127.*").code == 0
        assert ctl(broker, "connections", "--peer", "10.*").code == 10
        assert ctl(broker, "connections", "--idle", "1000").code == 10
    wait_until(lambda: ctl(broker, "connections").code == ExitCode.NOT_FOUND)


def test_top_prints_pages_for_pipes(calm, ctl):
    result = ctl(calm, "top", "--once")
    assert result.code == 0
    assert b"Bottleneck: " in result.out and b"supervisor 0" in result.out
    result = ctl(calm, "top", "--json", "--count", "2", "--interval", "0.1")
    pages = [json.loads(line) for line in result.out.splitlines()]
    assert len(pages) == 2 and pages[0]["queue_limit"] == 500


def test_top_without_a_terminal_ends_after_one_page_or_as_many_as_asked_for(calm, ctl):
    assert ctl(calm, "top").out.count(b"Bottleneck: ") == 1
    done = ctl(calm, "top", "-n", "2", "-i", "0.1")
    assert done.code == 0 and done.out.count(b"Bottleneck: ") == 2


def test_a_healthy_broker_has_nothing_that_fails(make_broker, ask, ctl):
    broker = make_broker(QUICK)
    findings = ask(broker, "doctor")
    assert "fail" not in {each["level"] for each in findings}
    told = [each["text"] for each in findings if each["check"] == "listener PLAINTEXT"]
    assert told == [f"clients are told {broker.bootstrap}, and it answers"]


def test_a_name_that_clients_cannot_dial_fails(make_broker, ask):
    broker = make_broker({**QUICK, "advertised.listeners": "PLAINTEXT://127.0.0.1:1"})
    findings = ask(broker, "doctor", code=ExitCode.ERROR)
    (failed,) = [each for each in findings if each["level"] == "fail"]
    assert "127.0.0.1:1" in failed["text"] and "advertised" in failed["fix"]


# -- what changes something ----------------------------------------------------------


def test_resize_and_restart_are_done_when_the_command_ends(make_broker, ctl, ask):
    broker = make_broker(QUICK)
    before = {each["pid"] for each in processes(ask(broker, "status"), "handler")}
    assert ctl(broker, "resize", "--handlers", "4").code == 0
    assert len(processes(ask(broker, "status"), "handler")) == 4
    assert ctl(broker, "resize", "--handlers", "1").code == 0
    (left,) = processes(ask(broker, "status"), "handler")
    result = ctl(broker, "restart", "handler", left["id"])
    assert result.code == 0 and b"1 handler" in result.out
    (now,) = processes(ask(broker, "status"), "handler")
    assert now["pid"] not in {left["pid"], *before}
    too_many = ctl(broker, "resize", "--handlers", "10000")
    assert too_many.code == ExitCode.USAGE
    assert "num.io.threads=10000" in too_many.err and "1 and 119" in too_many.err
    assert ctl(broker, "resize").code == ExitCode.USAGE
    nobody = ctl(broker, "restart", "handler", "55")
    assert nobody.code == ExitCode.ERROR and "55" in nobody.err


def test_two_at_once_are_both_answered(make_broker, ctl, ask, mpbroker):
    broker = make_broker(QUICK)
    command = [sys.executable, "-m", "mpbroker", "ctl"]
    where = ["--data-dir", str(broker.data_dir), "--timeout", "30"]
    several = [
        subprocess.Popen([*command, *what, *where], stdout=subprocess.DEVNULL)
        for what in (["resize", "--handlers", "3"], ["resize", "--handlers", "3"])
    ]
    assert [each.wait(60) for each in several] == [0, 0]
    assert len(processes(ask(broker, "status"), "handler")) == 3


def test_reload_applies_what_can_change_and_tells_what_cannot(tmp_path, ctl, ask):
    file = tmp_path / "server.properties"
    file.write_text("num.io.threads=2\nfetch.max.bytes=100000\n")
    broker = Broker(tmp_path / "data", {"num.network.threads": 1})
    with _with_file(broker, file):
        assert b"Nothing has changed" in ctl(broker, "reload").out
        file.write_text("num.io.threads=3\nsocket.request.max.bytes=70000\n")
        answer = ask(broker, "reload")
        assert {each["setting"] for each in answer["applied"]} == {
            "num.io.threads",
            "fetch.max.bytes",
        }
        assert answer["needs_restart"] == [
            {
                "setting": "socket.request.max.bytes",
                "from": "104857600",
                "to": "70000",
            }
        ]
        wait_until(lambda: len(processes(ask(broker, "status"), "handler")) == 3)
        file.write_text("num.io.threads=none\n")
        refused = ctl(broker, "reload")
        assert refused.code == ExitCode.ERROR and "num.io.threads" in refused.err
        assert broker.is_running


def _with_file(broker, file):
    broker.config["--config"] = file  # becomes the argument --config=FILE
    return broker


def test_stop_ends_the_broker_as_a_signal_does(make_broker, ctl):
    broker = make_broker(QUICK)
    result = ctl(broker, "stop", "--wait", "0")
    assert result.code == 0
    wait_until(lambda: not broker.is_running)
    assert not (broker.data_dir / "control.sock").exists()
    assert ctl(broker, "status", "-q").code == ExitCode.UNAVAILABLE
    broker._process = None


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_upgrade_that_the_broker_does_not_survive_is_not_waited_for(
    make_broker, mpbroker, monkeypatch, tmp_path, is_answered
):
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))  # the trial's directory is left
    broker = make_broker(QUICK)
    request = ControlClient.request

    def ask(client, command, **arguments):
        answer = request(client, command, **arguments)
        if command == "upgrade" and not is_answered:  # the newcomer was quicker
            raise BrokerUnavailableError("the broker closed the connection")
        return answer

    monkeypatch.setattr(ControlClient, "request", ask)
    newcomer = ["sh", "-c", "kill -9 $PPID"]
    wait = ["--data-dir", broker.data_dir, "--wait", 20]
    result = mpbroker("ctl", "upgrade", *wait, "--", *newcomer)
    assert result.code == ExitCode.UNAVAILABLE
    assert f"process {broker.pid} ended during the upgrade" in result.err
    broker.kill()


def test_a_broker_that_drains_refuses_the_new_and_serves_the_old(make_broker, ctl):
    import socket

    from mpbroker.client.addresses import parse_addresses
    from mpbroker.client.cluster import Cluster

    broker = make_broker(QUICK)
    (address,) = parse_addresses(broker.bootstrap)
    with Cluster([address], 60) as old:
        old.metadata([])
        assert ctl(broker, "drain", "--for", "600", "--wait", "0").code == 0
        with pytest.raises(OSError):
            wait_until(lambda: socket.create_connection(address, 5).close())
        assert old.metadata([]).brokers  # goes on
        refused = ctl(broker, "resize", "--handlers", "1")
        assert "drains" in refused.err
        # Its acceptors were told to end: nobody shall look for what killed them.
        looked = ctl(broker, "blackbox")
        assert looked.code == ExitCode.NOT_FOUND, looked.out
        assert broker.is_running
    wait_until(lambda: not broker.is_running)  # the last one has gone
    broker._process = None


# -- injected faults -------------------------------------------------------------------


@pytest.fixture
def fragile(make_broker):
    """A broker with one handler, whose parts can be made to fail."""
    return make_broker(
        {**QUICK, "num.io.threads": 1, "control.inject.enable": "true"}, name="fragile"
    )


def test_a_sync_that_fails_takes_its_partition_offline_and_ctl_says_so(
    fragile, mpbroker, ctl, ask
):
    produce(mpbroker, fragile, 1)
    assert ctl(fragile, "inject", "fail-sync", "handler", "0").code == 0
    with producing(fragile, acks="all"):
        wait_until(lambda: ask(fragile, "status")["offline"] == [["t", 0]])
    assert b"OFFLINE      t-0" in ctl(fragile, "status").out
    findings = ask(fragile, "doctor", code=ExitCode.ERROR)
    assert "t-0" in {each["check"] for each in findings if each["level"] == "fail"}


def test_a_full_ring_holds_requests_up_until_it_has_room(fragile, mpbroker, ctl, ask):
    produce(mpbroker, fragile, 1)
    assert ctl(fragile, "inject", "full-ring", "processor", "0").code == 0
    with producing(fragile) as client:
        wait_until(lambda: json.loads(ctl(fragile, "connections", "--json").out))
        before = ask(fragile, "status")["handlers"][0]["requests"]
        end = ctl(fragile, "inject", "full-ring", "processor", "0", "--value", "0")
        assert end.code == 0
        assert client.wait(60) == 0
    assert before < ask(fragile, "status")["handlers"][0]["requests"]


def test_a_stopped_process_goes_on_when_it_is_told_to(fragile, ctl, ask):
    def goes_on():
        """Or it took so long that the supervisor has replaced it: try again then."""
        (handler,) = processes(ask(fragile, "status"), "handler")
        assert ctl(fragile, "inject", "stop", "handler", "0").code == 0
        wait_until(lambda: process_state(handler["pid"]) in ("T", "Z", ""))
        ctl(fragile, "inject", "continue", "handler", "0")
        wait_until(lambda: process_state(handler["pid"]) != "T")
        return process_state(handler["pid"]) in ("S", "R", "D")

    wait_until(goes_on)


def test_a_fault_that_a_role_does_not_have_is_refused(fragile, ctl):
    result = ctl(fragile, "inject", "slow", "acceptor", "0")
    assert result.code == ExitCode.ERROR and "into a handler" in result.err
    nobody = ctl(fragile, "inject", "kill", "handler", "40")
    assert nobody.code == ExitCode.ERROR and "no handler 40" in nobody.err


def test_status_tells_that_acks_all_does_not_wait_for_the_disk(make_broker, ctl, ask):
    broker = make_broker({**QUICK, "log.flush.acks.all": "false"})
    with Producer(
        bootstrap_servers=broker.bootstrap, transactional_id="t", acks="all"
    ) as producer:
        producer.init_transactions()
        for _ in range(3):
            producer.begin_transaction()
            producer.send("t", b"x")
            producer.commit_transaction()
    state = ask(broker, "status")
    assert state["page_cache"]["by_default"]
    assert "t" in state["page_cache"]["topics"]
    # The records, and the transaction's state: no commit has waited for a sync.
    topics = {each["topic"] for each in state["power_cut"]["worst"]}
    assert topics >= {"t", "__transaction_state"}
    told = b"acks=all     does not wait for the disk: log.flush.acks.all=false"
    assert told in ctl(broker, "status").out


def test_status_names_topics_that_do_not_wait_for_the_disk(
    make_broker, mpbroker, ctl, ask
):
    broker = make_broker(QUICK)
    assert b"acks=all" not in ctl(broker, "status").out
    for number in range(4):
        result = mpbroker(
            *("topic", "create", f"t{number}", "-b", broker.bootstrap),
            *("--config", "flush.acks.all=false"),
        )
        assert result.code == 0, result.err
    told = b"does not wait for the disk for t0, t1, t2 and 1 more"
    assert told in ctl(broker, "status").out
    assert ask(broker, "status")["page_cache"]["number"] == 4
