"""The whole broker is replaced under load, and no client notices."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.cli.exit_codes import CliError
from mpbroker.inspect.control_protocol import encode_frame
from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
)
from tests.broker.load import (
    TOPIC,
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
    states,
)
from tests.broker.resizing import sizes
from tests.supervisor.test_resize import holdings
from tests.support.broker import Broker
from tests.support.children import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def broker(make_broker):
    made = make_broker({"num.network.threads": 2, "num.io.threads": 2})
    create_topic(made)
    return made


def newcomer(broker, version="9.9", fault="none"):
    """The command of another version, with the settings the broker has."""
    settings = [f"{key}={value}" for key, value in broker.config.items()]
    module = [sys.executable, "-m", "tests.supervisor.upgrade.newcomer"]
    return [*module, version, fault, "serve", *settings]


def order(broker, command, **arguments):
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0) as client:
        client.request(command, **arguments)


def upgrade(broker, command=None):
    order(broker, "upgrade", argv=command)


def identity(broker):
    state = read_telemetry(f"/mpbroker-{broker.pid}-{start_time(broker.pid)}")
    return state or {}


def wait_for_end(broker, *beginnings):
    wait_until(lambda: identity(broker).get("upgrade", "").startswith(beginnings))
    wait_until(lambda: {child["state"] for child in states(broker)} == {"READY"})
    return identity(broker)["upgrade"]


def test_a_broker_is_as_old_as_its_first_program_and_says_what_the_next_one_does(
    broker, tmp_path
):
    started, go_on = identity(broker)["started"], tmp_path / "go-on"
    replace = tmp_path / "replace"
    upgrade(broker, newcomer(broker, fault=f"held={go_on}+still={replace}"))
    wait_until(lambda: identity(broker).get("version") == "9.9")
    # Told with the version already: there is no moment between the two.
    assert identity(broker)["upgrade"].startswith("replacing the processes of")
    replace.touch()
    with pytest.raises(CliError, match="an upgrade is under way"):
        upgrade(broker)
    go_on.touch()
    wait_for_end(broker, "done")
    assert identity(broker)["started"] == started
    command = [sys.executable, "-m", "mpbroker", "ctl", "status", "-d", broker.data_dir]
    said = subprocess.check_output(command, text=True)
    assert re.search(r"upgrade +done: .* to 9.9 \(.* ago\)\n", said)


def test_another_version_takes_over_under_load_and_nobody_notices(broker):
    before = children(broker)
    with Load(broker, 8) as load:
        load.run(50)
        for version in ("9.8", "9.9"):
            upgrade(broker, newcomer(broker, version))
            while identity(broker).get("version") != version:
                assert "failed" not in identity(broker).get("upgrade", "")
                load.run(20)
            load.run(50)
            wait_for_end(broker, "done")
        load.run(50)
    assert sum(load.losses) == 0
    assert not set(before.values()) & set(children(broker).values())
    assert identity(broker)["upgrade"] == "done: 9.8 to 9.9"
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_without_a_command_it_is_the_same_again_and_holds_what_it_held(broker):
    processes = set(children(broker).values())
    wait_until(lambda: not holdings(broker)["rows"])
    before = holdings(broker)
    upgrade(broker)
    wait_for_end(broker, "done")
    assert not processes & set(children(broker).values())
    # Neither here nor in the trial: a trial that must be killed takes 20 s.
    assert "did not end in time" not in broker.log_path.read_text()
    # None has died, though those that have no other beside them were killed.
    assert not [each for each in states(broker) if each["restarts"]]
    assert not [each for each in states(broker) if each["last_exit"]]
    with dial(broker) as sock:
        assert api_versions(sock)

    def kept():
        now = holdings(broker)
        kinds = ("descriptors", "rows", "slots", "queued", "sharing")
        return all(now[kind] == before[kind] for kind in kinds)

    wait_until(kept)


def test_a_client_that_does_not_read_its_answer_holds_up_no_upgrade(broker):
    with dial(broker) as producer, dial(broker) as slow:
        for _ in range(25):
            ask(producer, ApiKey.PRODUCE, 9, produce_body(os.urandom(900_000)))
        # More than the buffers of both sockets take.
        partition = FetchPartition(partition_max_bytes=64_000_000)
        request = FetchRequest(
            max_bytes=64_000_000,
            topics=[FetchTopic(topic=TOPIC, partitions=[partition])],
        )
        slow.sendall(frame(ApiKey.FETCH, 11, request.encode(11)))
        assert slow.recv(4, socket.MSG_PEEK | socket.MSG_WAITALL)
        upgrade(broker, newcomer(broker))
        wait_until(lambda: identity(broker).get("upgrade", "").startswith("done"))
        assert "DRAINING" in {child["state"] for child in states(broker)}
        assert len(receive_frame(slow)) > 22_000_000
    wait_until(lambda: {child["state"] for child in states(broker)} == {"READY"})


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("trial", "before it could say why"),
        ("layout+trial", "before it could say why"),
    ],
)
def test_a_newcomer_that_fails_its_trial_changes_nothing(broker, fault, reason):
    before = children(broker)
    upgrade(broker, newcomer(broker, fault=fault))
    ended = wait_for_end(broker, "failed, and nothing has changed")
    assert reason in ended
    assert children(broker) == before


@pytest.mark.parametrize("fault", ["takeover", "handler", "descriptors", "settings"])
def test_a_newcomer_that_fails_later_is_undone_and_nobody_notices(broker, fault):
    version = identity(broker)["version"]
    with Load(broker, 8) as load:
        upgrade(broker, newcomer(broker, fault=fault))
        while not identity(broker).get("upgrade", "").startswith("failed"):
            load.run(20)
        wait_for_end(broker, "failed, and was undone")
        load.run(50)
    assert sum(load.losses) == 0
    assert identity(broker)["version"] == version
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_settings_that_cannot_change_in_place_are_named(broker):
    command = [*newcomer(broker), "node.id=7"]
    upgrade(broker, command)
    assert "node.id: 7 in the newcomer, 1 in the running" in wait_for_end(
        broker, "failed"
    )


def install(directory: Path, version: str) -> None:
    """As deploy/install.sh does: with a Python of its own, and a link to the newest."""
    (directory / version / "bin").mkdir(parents=True)
    (directory / version / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", directory / version)
    python = directory / version / "bin" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    script = directory / version / "bin" / "mpbroker"
    script.write_text(
        f"#!{python}\n"
        "import sys, mpbroker\n"
        "mpbroker.__version__ = sys.executable.split('/')[-3]\n"
        "from mpbroker.cli import main\n"
        "sys.exit(main())\n"
    )
    script.chmod(0o755)
    (directory / "new").symlink_to(version)
    (directory / "new").rename(directory / "installed")


def test_without_a_command_what_is_installed_now_takes_over(tmp_path):
    install(tmp_path, "1.0")
    command = [os.fspath(tmp_path / "installed" / "bin" / "mpbroker")]
    environ = {"PYTHONPATH": os.fspath(ROOT)}
    with Broker(tmp_path / "data", environ=environ, command=command) as broker:
        assert identity(broker)["version"] == "1.0"
        install(tmp_path, "1.1")
        upgrade(broker)
        assert wait_for_end(broker, "done") == "done: 1.0 to 1.1"


@pytest.mark.parametrize("wrong", ["num.partitions=many", "--no-such-option"])
def test_what_is_wrong_about_a_newcomers_settings_is_named(broker, wrong):
    upgrade(broker, [*newcomer(broker), wrong])
    assert wrong.partition("=")[0] in wait_for_end(broker, "failed")


def test_a_program_that_is_not_there_is_refused_at_once(broker):
    with pytest.raises(Exception, match="/no/such: there is no such program"):
        upgrade(broker, ["/no/such", "serve"])


def test_it_is_said_why_a_program_cannot_be_run(broker, tmp_path):
    script = tmp_path / "mpbroker"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    upgrade(broker, [str(script)])
    why = f"{script} cannot be run: No such file or directory"
    said = wait_for_end(broker, "failed")
    assert said == f"failed, and nothing has changed: {why}"


def test_a_broker_that_drains_is_not_replaced_and_serves_who_is_there(broker):
    orders = {"upgrade": {"argv": newcomer(broker)}, "drain": {"for_s": 3600}}
    with dial(broker) as sock, socket.socket(socket.AF_UNIX) as control:
        api_versions(sock)
        control.connect(os.fspath(broker.data_dir / "control.sock"))
        # At once: no newcomer is ready before the second is read.
        control.sendall(
            b"".join(
                encode_frame({"command": name, "arguments": arguments})
                for name, arguments in orders.items()
            )
        )
        said = "failed, and nothing has changed: the broker drains"
        wait_until(lambda: identity(broker).get("upgrade") == said)
        api_versions(sock)


def test_resizes_while_the_broker_is_replaced_are_carried_out_and_nobody_notices(
    broker,
):
    with Load(broker, 8) as load:
        load.run(50)
        upgrade(broker, newcomer(broker))
        order(broker, "resize", handlers=4, processors=1)  # while that tries itself
        while identity(broker).get("version") != "9.9":
            assert "failed" not in identity(broker).get("upgrade", "")
            load.run(20)
        order(broker, "resize", handlers=1, processors=3)  # while children are replaced
        load.run(50)
        assert wait_for_end(broker, "done", "failed").startswith("done")
        wait_until(lambda: sizes(broker) == (1, 3))
        load.run(50)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))
