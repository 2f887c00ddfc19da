"""Prove a release on bare systems: Debian roots that have a Python and nothing else.

What `scripts/prove` runs, as root. debootstrap makes a root for each suite, once, below
.downloads/roots. Two wheels are made of the commit, the second with a later version,
with the core that zig compiles; deploy/first_use.py walks with them in the root, in a
namespace of its own for processes, mounts and shared memory. With --tests an ordinary
user sets a clean checkout up there instead, in a folder with a space in its name, and
runs its tests without a network.
"""

from __future__ import annotations

import argparse
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
_PACKAGES: Final = "--include=python3,python3-venv,ca-certificates"
# Package indexes are reached as by this machine.
_SHARED: Final = ("etc/ssl/certs", "etc/resolv.conf", "etc/pip.conf")
_ENTER: Final = """
set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=0755 dev "$root/dev"
for name in null zero full random urandom; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
for name in %s; do
    [ -e "/$name" ] || continue
    [ -d "/$name" ] || touch "$root/$name"
    mount --bind "/$name" "$root/$name"
done
exec chroot "$root" "$@"
"""
# A user that Debian gives to nobody.
_USER: Final = "4000"


def enter(root: Path, *command: str, network: bool = True) -> list[str]:
    """Return what runs a command in a root; all its processes end with it.

    Args:
        root: where the command runs.
        command: the program and its arguments.
        network: this machine's; without it there is only loopback.
    """
    script = _ENTER % " ".join(_SHARED)
    alone = () if network else ("--net",)
    if not network:
        script = f"ip link set lo up\n{script}"
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", *alone),
        *("sh", "-c", script, "sh", str(root), *command),
    ]


def make_root(suite: str) -> Path:
    """Return the root of a suite, which is made if it is not there."""
    folder = ROOTS / suite
    if not folder.exists():
        ROOTS.mkdir(parents=True, exist_ok=True)
        half = ROOTS / f"{suite}.half"
        shutil.rmtree(half, ignore_errors=True)
        release._run(["debootstrap", "--variant=minbase", _PACKAGES, suite, str(half)])
        half.rename(folder)
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
        user += ["env", f"HOME={home}", f"--chdir={home}/{checkout.name}"]
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
    options = parser.parse_args(arguments)
    try:
        for suite in options.suites:
            if options.tests is None:
                prove(suite)
            else:
                prove_tests(suite, options.tests)
    except release.ReleaseError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
