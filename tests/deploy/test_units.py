"""The systemd units: valid, alike and tight, and a broker lacks no call within them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.config import BrokerConfig
from tests.broker.load import Load, children, create_topic, read_log
from tests.support import unit_sandbox
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.unit_sandbox import settings_of

UNITS = Path(__file__).resolve().parents[2] / "systemd"
SERVICES = ["mpbroker.service", "mpbroker@.service"]
PIPELINE = "mpbroker-pipeline@.service"
EXPOSURE = 2.0

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze (Debian: apt-get install systemd)",
)
needs_sandbox = pytest.mark.skipif(
    bool(unit_sandbox.why_not()), reason=unit_sandbox.why_not()
)


@pytest.fixture
def installed(tmp_path):
    """The units, with an executable for each that they name by an absolute path."""
    program = tmp_path / "mpbroker"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    folder = tmp_path / "units"
    folder.mkdir()
    for unit in UNITS.iterdir():
        name = unit.name.replace("@.", "@one.")
        text = re.sub(r"/opt/[a-z-]+/bin/mpbroker", str(program), unit.read_text())
        (folder / name).write_text(text)
    return folder


def analyze(*arguments):
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_analyze
@pytest.mark.parametrize("unit", [*SERVICES, PIPELINE, "mpbroker.socket"])
def test_systemd_has_nothing_to_say_against_a_unit(installed, unit):
    path = installed / unit.replace("@.", "@one.")
    done = analyze("verify", "--man=no", "--recursive-errors=no", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_analyze
def test_systemd_would_have_something_to_say_against_a_wrong_one(installed):
    path = installed / "mpbroker.service"
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=gently"))
    done = analyze("verify", "--man=no", "--recursive-errors=no", str(path))
    assert "gently" in done.stderr


@needs_analyze
@pytest.mark.parametrize("unit", [*SERVICES, PIPELINE])
def test_a_services_exposure_is_low(unit):
    threshold = f"--threshold={EXPOSURE * 10:.0f}"
    done = analyze("security", "--offline=true", threshold, str(UNITS / unit))
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= EXPOSURE and done.returncode == 0, done.stdout


def test_the_two_services_differ_in_names_only():
    one, many = (settings_of(UNITS / unit) for unit in SERVICES)
    different = {key for key in one | many if one.get(key) != many.get(key)}
    assert different == {
        "Description",
        "ExecReload",
        "ExecStart",
        "RuntimeDirectory",
        "StateDirectory",
    }
    for key in different:
        assert "%i" in many[key][0] and "%i" not in one[key][0]


@pytest.mark.parametrize("unit", [*SERVICES, PIPELINE])
def test_codes_that_starting_again_cannot_help_are_the_programs(unit):
    (codes,) = settings_of(UNITS / unit)["RestartPreventExitStatus"]
    assert {int(code) for code in codes.split()} == {ExitCode.USAGE, ExitCode.CONFIG}
    assert ExitCode.CONFIG == os.EX_CONFIG


def test_the_socket_unit_listens_where_a_broker_does_by_default():
    settings = settings_of(UNITS / "mpbroker.socket")
    (endpoint,) = BrokerConfig.load({}, None, {}).endpoints
    assert settings["ListenStream"] == [f"{endpoint.host}:{endpoint.port}"]
    assert settings["FileDescriptorName"] == [endpoint.listener_name]


@needs_sandbox
@pytest.mark.parametrize("unit", SERVICES)
def test_a_broker_serves_dies_repairs_and_stops_within_a_unit(tmp_path, unit):
    """Every system call that it needs, and no capability, is what the unit leaves."""
    broker = Broker(
        tmp_path / "data",
        {"listeners": "PLAINTEXT://localhost:0"},
        command=unit_sandbox.command_in(UNITS / unit, sys.executable, "-m", "mpbroker"),
    )
    with broker:
        status = Path("/proc", str(broker.pid), "status").read_text()
        assert re.search(r"^CapBnd:\s*0+$", status, re.M) or os.geteuid() != 0
        assert re.search(r"^Seccomp:\s*2$", status, re.M)
        create_topic(broker)
        with Load(broker, 4) as load:
            load.run(40)
            for role in ("handler", "processor", "acceptor"):
                os.kill(children(broker)[role, 0], signal.SIGKILL)
            load.run(40)
            with ControlClient(str(broker.data_dir / "control.sock"), 30) as control:
                control.request("resize", handlers=3)
                wait_until(lambda: ("handler", 2) in children(broker))
                control.request("upgrade")
            wait_until(lambda: "upgrade: done" in broker.log_tail())
            load.run(40)
        load.verify(read_log(broker.data_dir))
        assert "not permitted" not in broker.log_tail()


@needs_sandbox
@pytest.mark.parametrize(
    ("forbidden", "code"),
    [
        ("import os; os.setuid(os.getuid())", 1),
        ("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", 1),
        ("import mmap; mmap.mmap(-1, 4096, prot=7)", 1),
        ("pass", 0),
    ],
)
def test_what_a_unit_forbids_fails_in_the_imitation(forbidden, code):
    done = subprocess.run(
        unit_sandbox.command_in(
            UNITS / "mpbroker.service", sys.executable, "-c", forbidden
        ),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert b"Operation not permitted" in done.stderr or code == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd")
def test_the_user_and_its_directories_are_made(tmp_path):
    (tmp_path / "etc").mkdir()
    root = f"--root={tmp_path}"
    for tool, file in (
        (["systemd-sysusers"], "mpbroker.sysusers"),
        (["systemd-tmpfiles", "--create"], "mpbroker.tmpfiles"),
    ):
        done = subprocess.run(
            [*tool, root, str(UNITS / file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    user = (tmp_path / "etc/passwd").read_text().split(":")
    assert user[0] == "mpbroker" and user[6].strip().endswith("nologin")
    assert int(user[2]) < 1000  # or a logout would remove its shared memory
    data = (tmp_path / "var/lib/mpbroker").stat()
    assert (data.st_uid, data.st_mode & 0o777) == (int(user[2]), 0o750)
    settings = (tmp_path / "etc/mpbroker").stat()
    assert (settings.st_uid, settings.st_gid) == (0, int(user[3]))
