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


def test_pipelines_have_a_unit_and_programs_of_their_own_and_stay(tmp_path):
    installed = tmp_path / "root"
    installed.mkdir()
    unit = installed / "etc/systemd/system/mpbroker-pipeline@.service"
    for arguments in (["--pipelines"], []):  # what is there is kept up to date
        done = install("--root", installed, "--python", sys.executable, *arguments)
        assert done.returncode == 0, done.stderr
        (program,) = re.findall(r"ExecStart=(\S+)", unit.read_text())
        programs = installed / "opt/mpbroker-pipeline"
        assert program == "/opt/mpbroker-pipeline/bin/mpbroker"
        assert (programs / "bin/mpbroker").exists()
        assert programs.resolve().name.startswith("mpbroker-pipeline-")
        # Each is a link to programs of its own, and the other's are not old ones of it.
        assert (installed / "opt/mpbroker/.complete").exists()
        assert (installed / "etc/mpbroker/pipelines").is_dir()
        assert "# of an older release" not in unit.read_text()
        unit.write_text(unit.read_text() + "# of an older release\n")


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
        "opt/mpbroker-pipeline-0123456789ab/pyvenv.cfg",
        "opt/mpbroker-notes/todo",
        "etc/systemd/system/mpbroker.service",
        "etc/systemd/system/mpbroker-pipeline@.service",
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
    pipeline = tmp_path / "opt/mpbroker-pipeline"
    pipeline.symlink_to("mpbroker-pipeline-0123456789ab")
    done = install("--uninstall", "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {
        "opt/mpbroker-notes/todo",
        "etc/mpbroker/server.properties",
        "var/lib/mpbroker/meta.properties",
    }
    assert not (tmp_path / "opt/mpbroker").is_symlink()
    assert not pipeline.is_symlink()
    assert "/var/lib/mpbroker" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--frobnicate"], 2, "no such option: --frobnicate"),
        (["--root"], 2, "--root needs a value"),
        (["--root", "/no/such/root"], 1, "make it first"),
        (["--root", "/tmp", "--start"], 1, "nothing can be started"),
        (["--root", "/tmp", "--python", "/no/such/python"], 1, "Python 3.11 or newer"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_fix(arguments, code, words):
    done = install(*arguments)
    assert done.returncode == code
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


@pytest.fixture
def hidden_python(tmp_path):
    """A Python that only root can reach, as one of pyenv's in /root is."""
    folder = tmp_path / "hidden"
    folder.mkdir(mode=0o700)
    python = folder / "python3"
    shutil.copy(os.path.realpath(sys.executable), python)
    home = f"export PYTHONHOME={sys.base_prefix}; "
    script = folder / "bin" / "python3"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n{home}exec {python} "$@"\n')
    script.chmod(0o755)
    return script


def test_a_python_that_the_services_user_cannot_run_is_refused_even_in_a_dry_run(
    hidden_python, tmp_path
):
    done = install("--dry-run", "--python", hidden_python)
    assert done.returncode == 1
    assert "the service's user cannot run it" in done.stderr
    # Below another root the result is for another machine.
    elsewhere = install("--dry-run", "--python", hidden_python, "--root", tmp_path)
    assert elsewhere.returncode == 0, elsewhere.stderr


@pytest.mark.skipif(
    subprocess.run(
        ["/usr/bin/python3", "-c", "import venv, ensurepip, tomllib"],
        capture_output=True,
        check=False,
    ).returncode
    != 0,
    reason="no Python 3.11 of the system's with venv",
)
def test_the_first_python_that_its_user_can_run_is_chosen(hidden_python):
    path = f"{hidden_python.parent}:/usr/bin:/bin"
    done = install("--dry-run", PATH=path)
    assert done.returncode == 0, done.stderr
    system = subprocess.check_output(["/usr/bin/python3", "-V"], text=True).strip()
    assert re.search(rf"/opt/mpbroker-\w+, with {system}\n", done.stdout)


# -- the Debian package, made of what was installed ------------------------------------

DEBIAN = ROOT / "deploy" / "debian"
with_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")


def build_package(staged, output):
    done = subprocess.run(
        [DEBIAN / "build", "--staged", staged, "--output", output],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env={
            **os.environ,
            "BUILD_PYTHON": sys.executable,  # what is staged has no dependencies
            "SOURCE_DATE_EPOCH": "1700000000",
            "DPKG_DEB_COMPRESSOR_LEVEL": "0",  # a package is small in half a minute
        },
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (package,) = output.glob("*.deb")
    return package


@pytest.fixture(scope="module")
def package(installed, tmp_path_factory):
    return build_package(installed, tmp_path_factory.mktemp("package"))


@pytest.fixture
def dpkg(tmp_path):
    """Runs dpkg below another root, and its scripts with DPKG_ROOT."""
    root = tmp_path / "system"
    for folder in ("updates", "info"):
        (root / "var/lib/dpkg" / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "etc").mkdir()

    def run(*arguments):
        done = subprocess.run(
            [
                *("dpkg", f"--root={root}", "--force-script-chrootless"),
                *("--force-depends", "--log=/dev/null", *map(str, arguments)),
            ],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return root

    return run


@with_dpkg
def test_a_package_has_equal_bytes_each_time_and_what_debian_wants(
    installed, package, tmp_path
):
    again = build_package(installed, tmp_path)
    assert again.read_bytes() == package.read_bytes()
    listed = subprocess.check_output(["dpkg-deb", "-c", package], text=True)
    for name in (
        "/usr/bin/mpbroker -> /opt/mpbroker/bin/mpbroker",
        "/usr/lib/systemd/system/mpbroker.service",
        "/usr/share/man/man1/mpbroker-topic.1.gz",
        "/usr/share/doc/mpbroker/copyright",
    ):
        assert f".{name}" in listed
    assert not re.search(r"^(?!l).{5}w|^(?!l).{8}w", listed, re.M)  # for all to write
    control = subprocess.check_output(["dpkg-deb", "-f", package], text=True)
    assert re.search(
        r"^Depends: python3 \(>= 3\.\d+\), python3 \(<< 3\.", control, re.M
    )


def test_a_package_is_not_built_with_an_option_that_is_not_there():
    done = subprocess.run([DEBIAN / "build", "--bogus"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such option: --bogus" in done.stderr


@with_dpkg
def test_a_package_is_installed_removed_and_purged(package, dpkg):
    root = dpkg("-i", package)
    assert (root / "opt/mpbroker/bin/python").is_symlink()
    assert "mpbroker:" in (root / "etc/passwd").read_text()
    settings = root / "etc/mpbroker/server.properties"
    BrokerConfig.load({}, settings, {})
    settings.write_text("# mine\n")
    (root / "var/lib/mpbroker/data").write_text("records")
    dpkg("-i", package)
    assert settings.read_text() == "# mine\n"
    dpkg("-r", "mpbroker")
    assert not list((root / "opt").iterdir())
    assert settings.exists() and (root / "var/lib/mpbroker/data").exists()
    dpkg("-P", "mpbroker")
    assert not settings.parent.exists() and not (root / "var/lib/mpbroker").exists()


@with_dpkg
def test_a_packages_upgrade_takes_no_file_from_a_running_program(
    installed, package, dpkg, tmp_path
):
    root = dpkg("-i", package)
    old = root / "opt" / (root / "opt/mpbroker").readlink()
    staged = tmp_path / "staged"
    shutil.copytree(installed / "opt", staged / "opt", symlinks=True)
    later = staged / "opt/mpbroker-0123456789ab"
    (staged / "opt" / old.name).rename(later)
    (staged / "opt/mpbroker").unlink()
    (staged / "opt/mpbroker").symlink_to(later.name)
    (folder,) = old.glob("lib/python*/site-packages/mpbroker")
    # A process that has mapped a file of the old program, as a broker has its core.
    body = f"import mmap, time; f = open({str(folder / 'py.typed')!r}, 'w+b');"
    body += "f.truncate(1); m = mmap.mmap(f.fileno(), 1); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        user.stdout.readline()
        dpkg("-i", build_package(staged, tmp_path / "later"))
        assert (root / "opt/mpbroker").readlink() == Path(later.name)
        assert (folder / "__init__.py").exists()
        user.communicate(b"\n")
    dpkg("-i", tmp_path / "later" / package.name)
    assert not old.exists()


def test_a_packages_upgrade_is_taken_over_by_each_broker_that_runs(tmp_path):
    said = tmp_path / "said"
    for name, answer in (
        (
            "systemctl",
            "printf 'mpbroker@a.service loaded\\nmpbroker.service loaded\\n'",
        ),
        ("mpbroker", 'case $* in *"/a/"*) exit 1 ;; esac'),
    ):
        program = tmp_path / name
        lines = "#!/bin/sh", f'echo "{name} $*" >> {said}', answer
        program.write_text("\n".join(lines))
        program.chmod(0o755)
    script = (DEBIAN / "postinst").read_text()
    block = re.search(r'^if \[ ! "\$root".*?^fi$', script, re.M | re.S)
    there = block[0].replace("/run/systemd/system", str(tmp_path))
    there = there.replace("/opt/mpbroker/bin", str(tmp_path))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", f"root=; {there}"], env=environ, check=True)
    upgrade = "mpbroker ctl upgrade --socket /run/mpbroker"
    assert said.read_text().splitlines()[2:] == [
        f"{upgrade}/a/control.sock",
        "systemctl try-restart mpbroker@a.service",  # its upgrade has failed
        f"{upgrade}/control.sock",
    ]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
@pytest.mark.parametrize("name", ["build", "postinst", "prerm", "postrm"])
def test_shellcheck_has_nothing_to_say_of_the_package(name):
    command = ["shellcheck", "-x", f"--source-path={ROOT}", DEBIAN / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


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
