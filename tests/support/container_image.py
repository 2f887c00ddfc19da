"""The images of deploy/, built and run without an engine, as deploy/image.py does it.

    python -m tests.support.container_image     makes the base for tests, once: minutes

The base is a Debian of the Dockerfile's Python, kept below .downloads/; nothing is
installed, and no container outlives a test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from deploy import image, prove

ROOT: Final = Path(__file__).resolve().parents[2]
_NEEDED: Final = ("unshare", "nsenter", "chroot", "mount")


class UnavailableError(Exception):
    """There is no tool, or no base: nothing can be said of the image."""


def check() -> None:
    """Raise UnavailableError, with the reason, if no image can be built here."""
    if os.geteuid():
        raise UnavailableError("only root builds images")
    if lacking := [each for each in _NEEDED if shutil.which(each) is None]:
        raise UnavailableError(f"no {', '.join(lacking)}")
    if not (prove.ROOTS / "python").exists():
        raise UnavailableError(f"no base: python -m {__name__} makes one")


@contextmanager
def built() -> Iterator[image.Stage]:
    """Build the broker's image, which is gone afterwards.

    Raises:
        UnavailableError: with the reason.
    """
    check()
    with TemporaryDirectory(prefix="mpbroker-image-") as scratch:
        yield image.build_broker(Path(scratch))


@contextmanager
def built_pipeline(broker: image.Stage) -> Iterator[image.Stage]:
    """Build the image of pipelines on the broker's. It downloads some 500 MB."""
    deploy = ROOT / "deploy"
    with TemporaryDirectory(prefix="mpbroker-image-") as scratch:
        file = deploy / "Dockerfile.pipeline"
        yield image.build(file, deploy, broker, Path(scratch))


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
    built: image.Stage,
    data: Path,
    user: str,
    command: Sequence[str],
    environ: Sequence[str] = (),
) -> list[str]:
    """Return what runs a command as process 1 of a container with a read-only root.

    Args:
        built: the image.
        data: stands for the volume.
        user: UID:GID.
        command: what to run, in namespaces of its own for mounts and processes.
        environ: NAME=VALUE, besides the image's.
    """
    config = built.image_config()
    *_, volume = config["Volumes"]
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("sh", "-c", _READ_ONLY, "sh", str(built.root), volume, str(data), user),
        *("env", "--ignore-environment", *config["Env"], *environ, *command),
    ]


def beside(
    built: image.Stage, first: int, user: str, command: Sequence[str]
) -> list[str]:
    """Return what runs a command in such a container, as an engine's `exec` does.

    Args:
        built: the image.
        first: process 1 of the container, by its id here.
        user: UID:GID.
        command: what to run.
    """
    return [
        *("nsenter", f"--target={first}", "--mount", "--pid"),
        *("chroot", "--groups=", f"--userspec={user}", str(built.root)),
        *("env", "--ignore-environment", *built.image_config()["Env"], *command),
    ]


if __name__ == "__main__":
    image.make_base()
