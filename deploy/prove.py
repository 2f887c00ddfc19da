"""Prove a release on bare systems: Debian roots that have a Python and nothing else.

What `scripts/prove` runs, as root. debootstrap makes a root for each suite, once, below
.downloads/roots. Two wheels are made of the commit, the second with a later version,
with the core that zig compiles; deploy/first_use.py walks with them in the root, in a
namespace of its own for processes, mounts and shared memory. With --package it walks
with two Debian packages, which are built there. With --tests an ordinary user sets a
clean checkout up there, in a folder with a space in its name, and runs its tests
without a network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy import release

ROOT: Final = Path(__file__).resolve().parents[1]
ROOTS: Final = ROOT / ".downloads" / "roots"
# Python 3.11, 3.13, and the newest there is.
SUITES: Final = ("bookworm", "trixie", "sid")
_PACKAGES: Final = "python3,python3-venv,ca-certificates"
# Package indexes are reached as by this machine.
SHARED: Final = ("etc/ssl/certs", "etc/resolv.conf", "etc/pip.conf")
_SHARED_VARIABLES: Final = re.compile(r"(PIP|SSL)_\w+|\w+_(?i:proxy)")
# What every machine has, and debootstrap does not write.
_HOSTS: Final = "127.0.0.1 localhost\n::1 localhost\n"
_ENTER: Final = """
set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=0755 dev "$root/dev"
for name in null zero full random urandom; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for name in %s; do
    [ -e "/$name" ] || continue
    [ -d "/$name" ] || touch "$root/$name"
    mount --bind "/$name" "$root/$name"
done
exec chroot "$root" "$@"
"""
# The exit code if there are no roots, so that nothing was proved or found wrong.
NOT_RUN: Final = 77
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
# A user that Debian gives to nobody.
_USER: Final = "4000"


class UnavailableError(release.ReleaseError):
    """There are no roots here, so nothing was proved or found wrong; it says why."""


def check_tools() -> None:
    """Raise UnavailableError if no roots can be made and entered here."""
    if os.geteuid():
        raise UnavailableError("only root makes roots: sudo scripts/prove")
    for tool, package in (
        ("debootstrap", "debootstrap"),
        ("unshare", "util-linux"),
        ("ip", "iproute2"),
    ):
        if shutil.which(tool) is None:
            raise UnavailableError(f"no {tool}: apt-get install {package}")


def enter(root: Path, *command: str, network: bool = True) -> list[str]:
    """Return what runs a command in a root; all its processes end with it.

    Args:
        root: where the command runs.
        command: the program and its arguments.
        network: this machine's; without it there is only loopback.
    """
    script = _ENTER % " ".join(SHARED)
    alone = () if network else ("--net",)
    if not network:
        script = f"ip link set lo up\n{script}"
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", *alone),
        *("sh", "-c", script, "sh", str(root), *command),
    ]


def shared_variables() -> dict[str, str]:
    """Return those variables of this process by which package indexes are reached."""
    return {
        name: value
        for name, value in os.environ.items()
        if _SHARED_VARIABLES.fullmatch(name)
    }


def debootstrap(suite: str, packages: str, folder: Path) -> Path:
    """Make a root of a suite and some of its packages; return its folder.

    Raises:
        UnavailableError: debootstrap could not, for one since no mirror answers.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    include = f"--include={packages}"
    command = ["debootstrap", "--variant=minbase", include, suite, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stdout.strip()[-500:]}")
    (folder / "etc/hosts").write_text(_HOSTS)
    return folder


def make_root(suite: str) -> Path:
    """Return the root of a suite, which is made if it is not there."""
    folder = ROOTS / suite
    if not folder.exists():
        # By rename: one that was interrupted is made again.
        debootstrap(suite, _PACKAGES, ROOTS / f"{suite}.half").rename(folder)
    return folder


def python_of(root: Path) -> str:
    """Return the version of a root's Python, such as 3.13."""
    look = "import sys; print('%d.%d' % sys.version_info[:2])"
    return release._run(enter(root, "python3", "-c", look)).strip()


def headers_for(version: str, root: Path, folder: Path) -> Path:
    """Return a folder with Python.h: this machine's, or else of the root's suite."""
    try:
        return release.pythons([], [version])[version][1]
    except release.ReleaseError:
        pass
    # A mirror may be a copy of some weeks ago.
    update = "apt-get -qq -o Acquire::Check-Valid-Until=false update"
    fetch = f"{update} && cd /tmp && apt-get -qq download libpython{version}-dev"
    release._run(enter(root, "sh", "-c", fetch))
    (package,) = (root / "tmp").glob(f"libpython{version}-dev_*.deb")
    release._run(["dpkg", "-x", str(package), str(folder)])
    package.unlink()
    include = folder / "usr/include" / f"python{version}"
    # Debian's pyconfig.h includes that of the processor, from beside its folder. All
    # processors with wheels have the same sizes and order of bytes.
    (own,) = (folder / "usr/include").glob(f"*-linux-gnu/python{version}/pyconfig.h")
    for platform in release.PLATFORMS:
        target = include / platform.triplet / f"python{version}"
        target.mkdir(parents=True)
        shutil.copy(own, target)
    return include


def make_wheels(version: str, include: Path, folder: Path) -> tuple[Path, Path]:
    """Return a wheel of the commit for a version of Python, and a later one."""
    (folder / "sources").mkdir(parents=True)
    sources = release.take_sources("HEAD", folder / "sources")
    platform = release.PLATFORMS[0]
    core = release.compile_core(sources, include, platform, release.zig(platform))
    made = []
    for _ in range(2):
        pure = release.pure_wheel(sources)
        wheel = release.write_wheel(
            pure, core, version, platform, sources.epoch, folder
        )
        release.check_wheel(wheel)
        release.audit(wheel)
        made.append(wheel)
        raise_version(sources.folder)
    return made[0], made[1]


def raise_version(folder: Path) -> None:
    """Give sources a version that is later than theirs."""
    module = folder / release.VERSION_FILE
    own = release.version_of(folder)
    base, _, dev = own.partition(".dev")
    later = f"{base}.dev{int(dev) + 1}" if dev else f"{own}.post1"
    module.write_text(module.read_text().replace(f'"{own}"', f'"{later}"'))


def make_package(root: Path, sources: Path, epoch: int) -> None:
    """Build the Debian package in a root that has a compiler, into its /packages.

    Args:
        root: of the suite that the package is for.
        sources: below the root.
        epoch: the package's time, s since 1970.
    """
    inside = f"/{sources.relative_to(root)}"
    words = [f"PATH={_PATH}:/usr/sbin:/sbin", f"SOURCE_DATE_EPOCH={epoch}"]
    words += [f"{name}={value}" for name, value in shared_variables().items()]
    build = f"{inside}/deploy/debian/build"
    release._run(enter(root, "env", "-i", *words, build, "--output", "/packages"))


def prove_package(suite: str) -> None:
    """Walk with the Debian package in the root of a suite.

    Raises:
        ReleaseError: something fails.
    """
    root = make_root(suite)
    print(f"{suite}: the Debian package", flush=True)
    with tempfile.TemporaryDirectory(prefix="mpbroker-prove-") as scratch:
        builder, system = Path(scratch) / "builder", Path(scratch) / "system"
        for copy in (builder, system):
            release._run(["cp", "-a", "--reflink=auto", str(root), str(copy)])
        needed = "gcc libc6-dev python3-dev systemd-standalone-sysusers"
        needed += " systemd-standalone-tmpfiles"
        quiet = "apt-get -qq -o Acquire::Check-Valid-Until=false"
        get = f"{quiet} update && {quiet} install -y --no-install-recommends {needed}"
        release._run(enter(builder, "sh", "-c", get))
        (builder / "sources").mkdir()
        sources = release.take_sources("HEAD", builder / "sources")
        for _ in range(2):
            make_package(builder, sources.folder, sources.epoch)
            raise_version(sources.folder)
        inside = system / "packages"
        shutil.copytree(builder / "packages", inside)
        shutil.copy(ROOT / "deploy/first_use.py", inside)
        packages = sorted(each.name for each in inside.glob("*.deb"))
        words = [f"/packages/{name}" for name in ("first_use.py", *packages)]
        done = subprocess.run(enter(system, "python3", *words))
    if done.returncode:
        raise release.ReleaseError(f"{suite}: the walk ended with {done.returncode}")


def prove(suite: str) -> None:
    """Walk in the root of a suite.

    Raises:
        ReleaseError: something fails.
    """
    root = make_root(suite)
    version = python_of(root)
    print(f"{suite}: Python {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mpbroker-prove-") as scratch:
        folder = Path(scratch)
        include = headers_for(version, root, folder / "headers")
        wheels = make_wheels(version, include, folder / "wheels")
        inside = Path(tempfile.mkdtemp(dir=root / "tmp"))
        try:
            script = Path(shutil.copy(ROOT / "deploy/first_use.py", inside))
            copied = [script, *(Path(shutil.copy(each, inside)) for each in wheels)]
            words = [f"/{path.relative_to(root)}" for path in copied]
            done = subprocess.run(enter(root, "python3", *words))
        finally:
            shutil.rmtree(inside)
    if done.returncode:
        raise release.ReleaseError(f"{suite}: the walk ended with {done.returncode}")


def prove_tests(suite: str, arguments: Sequence[str]) -> None:
    """Run the commit's tests in the root of a suite, as an ordinary user.

    Args:
        suite: of Debian.
        arguments: of pytest; without any, `scripts/test` runs all its checks.

    Raises:
        ReleaseError: the set-up or a test fails.
    """
    root = make_root(suite)
    inside = Path(tempfile.mkdtemp(dir=root / "tmp"))
    try:
        checkout = inside / "a check out"
        release._run(["git", "clone", "--quiet", str(ROOT), str(checkout)])
        release._run(["chown", "-R", f"{_USER}:{_USER}", str(inside)])
        user = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
        home = f"/{inside.relative_to(root)}"
        # A new user's variables, and none of this machine's others.
        given = {"PATH": _PATH, "HOME": home, **shared_variables()}
        user += ["env", "-i", f"--chdir={home}/{checkout.name}"]
        user += [f"{name}={value}" for name, value in given.items()]
        set_up = ["bash", "-ec", "source scripts/setup.sh; prepare test"]
        for network, command in (
            (True, set_up),
            (False, ["scripts/test", *arguments]),
        ):
            done = subprocess.run(enter(root, *user, *command, network=network))
            if done.returncode:
                raise release.ReleaseError(f"{suite}: {command} failed")
    finally:
        shutil.rmtree(inside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove on the suites that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/prove")
    parser.add_argument("suites", nargs="*", default=SUITES)
    parser.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        metavar="PYTEST-ARGUMENT",
        help="run the checkout's tests there, all or these",
    )
    parser.add_argument(
        "--package", action="store_true", help="walk with the Debian package"
    )
    options = parser.parse_args(arguments)
    try:
        check_tools()
        for suite in options.suites:
            if options.tests is not None:
                prove_tests(suite, options.tests)
            elif options.package:
                prove_package(suite)
            else:
                prove(suite)
    except release.ReleaseError as error:
        print(f"prove: {error}", file=sys.stderr)
        return NOT_RUN if isinstance(error, UnavailableError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
