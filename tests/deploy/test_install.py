"""The installer, run for real below another root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.config import BrokerConfig
from tests.support.broker import Broker

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "install.sh"
# pip fetches what builds the package: a slow network on a busy machine takes minutes.
INSTALL_TIMEOUT_S = 600

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
with_systemd = pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None,
    reason="no systemd-sysusers (Debian: apt-get install systemd)",
)


def install(*arguments, wrapper=(), **environ):
    return subprocess.run(
        [*wrapper, "bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        # Dependencies are those of the tests, and compiling what is optional takes its
        # time: neither is the installer's own doing.
        env={**os.environ, "PIP_NO_DEPS": "1", "CC": "false", **environ},
        check=False,
    )


def everything_below(folder):
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "/opt/" not in str(path)
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A root with mpbroker in it, and what the installer said."""
    root = tmp_path_factory.mktemp("root")
    done = install("--root", root, "--python", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


pytestmark = [as_root, with_systemd, pytest.mark.timeout(INSTALL_TIMEOUT_S + 60)]


def test_a_broker_runs_from_what_was_installed(installed, tmp_path):
    """With its own files: only what it depends on is borrowed from the tests' own."""
    program = installed / "opt/mpbroker"
    (site,) = program.glob("lib/python*/site-packages")
    borrowed = next(each for each in sys.path if each.endswith("site-packages"))
    broker = Broker(
        tmp_path / "data",
        {"--config": installed / "etc/mpbroker/server.properties"},
        environ={"PYTHONPATH": f"{site}:{borrowed}"},
        command=[str(program / "bin/python"), "-P", "-m", "mpbroker"],
    )
    with broker:
        maps = Path("/proc", str(broker.pid), "cmdline").read_bytes()
        assert os.fsencode(program) in maps
    # Below the root nothing names it: it is where it will be.
    script = (program / "bin/mpbroker").read_text()
    assert re.match(r"#!/opt/mpbroker-[0-9a-f]{12}/bin/python", script)


def test_the_units_name_what_was_installed(installed):
    for unit in ("mpbroker.service", "mpbroker@.service"):
        text = (installed / "etc/systemd/system" / unit).read_text()
        (program,) = re.findall(r"^ExecStart=(\S+)", text, re.M)
        assert (installed / program.lstrip("/")).exists()
        (settings,) = re.findall(r"--config %E/(\S+)", text)
        assert (installed / "etc" / settings.replace("%i", "server")).exists()


def test_settings_are_readable_by_the_broker_alone_and_fit_the_cores(installed):
    path = installed / "etc/mpbroker/server.properties"
    user = (installed / "etc/passwd").read_text().split(":")
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_gid == int(user[3])
    config = BrokerConfig.load({}, path, {"STATE_DIRECTORY": "/var/lib/mpbroker"})
    cores = len(os.sched_getaffinity(0))
    assert config.num_network_threads == min(8, max(1, cores // 2))
    assert config.num_io_threads == min(32, max(2, cores))


def test_doing_it_twice_is_doing_it_once_and_settings_stay(installed):
    path = installed / "etc/mpbroker/server.properties"
    mine = path.read_text() + "num.partitions=3\n"
    path.write_text(mine)
    before = everything_below(installed)
    programs = (installed / "opt/mpbroker").resolve()
    done = install("--root", installed, "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    assert everything_below(installed) == before
    assert path.read_text() == mine
    if (installed / "opt/mpbroker").resolve() == programs:  # sources as they were
        assert all("stays" in x or "should be" in x for x in done.stdout.splitlines())


def test_old_programs_stay_as_long_as_somebody_runs_them(installed):
    """Below another root, too: of a container's a broker may run."""
    old = installed / "opt/mpbroker-0123456789ab"
    old.mkdir()
    (old / ".complete").touch()
    shutil.copy(shutil.which("sleep"), old / "program")

    def is_there_after_another():
        done = install("--root", installed, "--python", sys.executable)
        assert done.returncode == 0, done.stderr
        return old.exists()

    with subprocess.Popen([old / "program", "inf"]) as running:
        try:
            assert is_there_after_another()
        finally:
            running.kill()
    assert not is_there_after_another()


@pytest.mark.parametrize("action", [[], ["--uninstall"]])
def test_a_dry_run_does_nothing_and_says_what_it_would_do(tmp_path, action):
    for unit in ("mpbroker.service", "mpbroker.socket"):
        if action:
            path = tmp_path / "etc/systemd/system" / unit
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    before = everything_below(tmp_path)
    done = install("--dry-run", "--root", tmp_path, "--python", sys.executable, *action)
    assert done.returncode == 0, done.stderr
    assert everything_below(tmp_path) == before
    assert "mpbroker.service" in done.stdout


def test_taking_it_away_leaves_settings_data_and_user(tmp_path):
    for made in (
        "opt/mpbroker-0123456789ab/pyvenv.cfg",
        "opt/mpbroker-notes/todo",
        "etc/systemd/system/mpbroker.service",
        "etc/systemd/system/mpbroker@.service",
        "etc/systemd/system/mpbroker.socket",
        "etc/sysusers.d/mpbroker.conf",
        "etc/tmpfiles.d/mpbroker.conf",
        "etc/mpbroker/server.properties",
        "var/lib/mpbroker/meta.properties",
    ):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    (tmp_path / "opt/mpbroker").symlink_to("mpbroker-0123456789ab")
    done = install("--uninstall", "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {
        "opt/mpbroker-notes/todo",
        "etc/mpbroker/server.properties",
        "var/lib/mpbroker/meta.properties",
    }
    assert not (tmp_path / "opt/mpbroker").is_symlink()
    assert "/var/lib/mpbroker" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--frobnicate"], "no such option: --frobnicate"),
        (["--root"], "--root needs a value"),
        (["--root", "/no/such/root"], "make it first"),
        (["--root", "/tmp", "--start"], "nothing can be started"),
        (["--root", "/tmp", "--python", "/no/such/python"], "Python 3.11 or newer"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_fix(arguments, words):
    done = install(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_without_root_it_says_how(tmp_path):
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    script = tmp_path / "install.sh"
    shutil.copy(SCRIPT, script)
    for parent in [tmp_path, *list(tmp_path.parents)[:3]]:
        parent.chmod(parent.stat().st_mode | 0o005)
    done = subprocess.run(
        [*nobody, "bash", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "needs root" in done.stderr and "sudo" in done.stderr


def test_help_is_what_the_script_begins_with():
    done = install("--help")
    assert done.returncode == 0
    assert "--uninstall" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(
        ["shellcheck", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
