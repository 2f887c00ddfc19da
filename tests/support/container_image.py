"""The images of deploy/, built and run without a daemon, by buildah.

    python -m tests.support.container_image     makes the base for tests, once: minutes

The Dockerfile begins with python:3.13-slim. Where its registry cannot be reached, a
Debian of the same Python, made by debootstrap, takes its place. All is kept below
.downloads/; nothing is installed, and no container outlives a test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
BASE: Final = "docker.io/library/python:3.13-slim"
NAME: Final = "mpbroker-test"
PIPELINE: Final = "mpbroker-pipeline-test"
_STORAGE: Final = ROOT / ".downloads" / "image"
_PULL_S: Final = 120
_BUILD_S: Final = 900
# Debian 13 has Python 3.13; and what the slim image has beside it.
_SUITE: Final = "trixie"
_PACKAGES: Final = "python3,python3-venv,python3-pip,python3-dev,ca-certificates"
# Source: debuerreotype, scripts/.slimify-excludes. And the static libraries of Python.
_NOT_SLIM: Final = (
    *("usr/share/doc/*", "usr/share/info/*", "usr/share/man/*", "usr/share/locale/*"),
    *("usr/share/lintian/*", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*"),
    *("usr/lib/python3*/config-*/*.a", "usr/lib/*/libpython3*.a"),
)
# A build reaches package indexes as this machine does.
_CERTIFICATES: Final = "/etc/ssl/certs"
_PIP: Final = "/etc/pip.conf"


class UnavailableError(Exception):
    """There is no tool, or no base: nothing can be said of the image."""


def buildah(*arguments: str) -> list[str]:
    """Return a command of buildah, on a storage of its own."""
    storage = ["--root", str(_STORAGE / "root"), "--runroot", str(_STORAGE / "run")]
    return ["buildah", *storage, "--storage-driver", "vfs", *arguments]


def run(*arguments: str, timeout_s: float = _BUILD_S) -> str:
    """Run a command of buildah; return what it printed."""
    done = subprocess.run(
        buildah(*arguments), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr}"
    return done.stdout.strip()


def build() -> dict[str, Any]:
    """Build the image; return its configuration.

    Raises:
        UnavailableError: with the reason.
    """
    if shutil.which("buildah") is None:
        raise UnavailableError("no buildah")
    if os.geteuid():
        raise UnavailableError("only root builds by chroot")
    if not has_base():
        pulled = subprocess.run(
            buildah("pull", "--quiet", BASE),
            capture_output=True,
            text=True,
            timeout=_PULL_S,
        )
        if pulled.returncode:
            raise UnavailableError(
                f"no {BASE} ({pulled.stderr.strip()[-80:]}); python -m"
                f" {__name__} makes another base"
            )
    return _bud(
        *("--ignorefile", str(ROOT / "deploy" / "Dockerfile.dockerignore")),
        *("-f", str(ROOT / "deploy" / "Dockerfile"), "-t", NAME, str(ROOT)),
    )


def build_pipeline() -> dict[str, Any]:
    """Build the image of pipelines on what `build` made; return its configuration.

    It downloads some 500 MB.
    """
    deploy = ROOT / "deploy"
    return _bud(
        f"--build-arg=BROKER=localhost/{NAME}",
        *("-f", str(deploy / "Dockerfile.pipeline"), "-t", PIPELINE, str(deploy)),
    )


def _bud(*arguments: str) -> dict[str, Any]:
    """Build an image; return its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy, since Debian's Java writes its own form of them beside them.
        own = f"{folder}/certs"
        shutil.copytree(_CERTIFICATES, own, ignore_dangling_symlinks=True)
        shared = [f"--volume={own}:{_CERTIFICATES}"]
        if Path(_PIP).exists():
            shared.append(f"--volume={_PIP}:{_PIP}:ro")
        run(
            *("bud", "--quiet", "--isolation", "chroot", "--pull-never"),
            *("--format", "docker", *shared, *arguments),
        )
    name = arguments[arguments.index("-t") + 1]
    config: dict[str, Any] = json.loads(run("inspect", "--type", "image", name))
    return dict(config["Docker"]["config"])


def has_base() -> bool:
    """Whether the base is in the storage."""
    found = subprocess.run(
        buildah("inspect", "--type", "image", BASE), capture_output=True
    )
    return found.returncode == 0


def command_in(
    container: str, command: Sequence[str], environ: dict[str, str] | None = None
) -> list[str]:
    """Return what runs a command in a container, as the image's user."""
    given = [f"--env={name}={value}" for name, value in (environ or {}).items()]
    return buildah("run", "--isolation", "chroot", *given, container, "--", *command)


# As engines do it with --read-only: the root, /tmp in memory, and the volume.
_READ_ONLY: Final = """
set -e
root=$1 volume=$2 data=$3 user=$4; shift 4
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=0755 dev "$root/dev"
for name in null zero full random urandom; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=64m shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount --bind "$data" "$root$volume"
mount -o remount,bind,ro "$root"
exec chroot --groups= --userspec="$user" "$root" "$@"
"""


def read_only(
    container: str,
    config: Mapping[str, Any],
    data: Path,
    user: str,
    command: Sequence[str],
) -> list[str]:
    """Return what runs a command as process 1 of a container with a read-only root.

    Args:
        container: a working container, of which the root is taken.
        config: the image's.
        data: stands for the volume.
        user: UID:GID.
        command: what to run, in namespaces of its own for mounts and processes.
    """
    (volume,) = config["Volumes"]
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("sh", "-c", _READ_ONLY, "sh", run("mount", container), volume),
        *(str(data), user, "env", "--ignore-environment", *config["Env"], *command),
    ]


def beside(
    container: str,
    config: Mapping[str, Any],
    first: int,
    user: str,
    command: Sequence[str],
) -> list[str]:
    """Return what runs a command in such a container, as an engine's `exec` does.

    Args:
        container: the working container.
        config: the image's.
        first: process 1 of it, by its id here.
        user: UID:GID.
        command: what to run.
    """
    return [
        *("nsenter", f"--target={first}", "--mount", "--pid"),
        *("chroot", "--groups=", f"--userspec={user}", run("mount", container)),
        *("env", "--ignore-environment", *config["Env"], *command),
    ]


def packed_layers(image: str) -> list[int]:
    """Return the bytes of an image's layers, the base's first, as they are pulled."""
    with tempfile.TemporaryDirectory() as folder:
        run("push", "--quiet", image, f"oci:{folder}:image")
        blobs = Path(folder, "blobs", "sha256")

        def read(digest: str) -> Any:
            return json.loads((blobs / digest.partition(":")[2]).read_text())

        index = json.loads(Path(folder, "index.json").read_text())
        manifest = read(index["manifests"][0]["digest"])
        return [each["size"] for each in manifest["layers"]]


def slim(root: Path) -> None:
    """Remove what neither Debian's slim images have nor python's: their sizes count."""
    for pattern in _NOT_SLIM:
        for each in root.glob(pattern):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def make_base() -> None:
    """Make a base out of Debian's packages, and name it as the Dockerfile does."""
    with tempfile.TemporaryDirectory() as folder:
        packages = f"--include={_PACKAGES}"
        subprocess.run(
            ["debootstrap", "--variant=minbase", packages, _SUITE, folder], check=True
        )
        Path(folder, "usr/bin/python").symlink_to("python3")
        slim(Path(folder))
        container = run("from", "scratch")
        run("add", "--quiet", container, folder, "/")
        run("commit", "--quiet", "--rm", container, BASE)


if __name__ == "__main__":
    if has_base():
        sys.exit(f"{BASE} is there")
    make_base()
