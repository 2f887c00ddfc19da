"""Whose fault a loss is: the same disk and the same cuts without a broker.

python -m tests.power_cuts.plain_files [MINUTES] [--seed N] [--fast-commit]

Four processes append records to files, force them to disk (fdatasync, and fsync of the
directories that have a new name), note that, and replace some of the files by synced
copies. Two others create, rename and remove files beside them. After each cut all must
be there that was noted. A loss here is one of the file system's.

With mkfs's option fast_commit it is. Linux 6.18.44 lost something in each of five runs.
After cut 218, and one each between 37 and 48 and between 97 and 108, the lookup of a
file failed with EUCLEAN, and the kernel said "ext4_lookup: deleted inode referenced".
After a cut between 13 and 24, and after cut 119, the disk could not be mounted again,
and it said "JBD2: journal recovery failed". 276 cuts of disks without the option lost
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mpbroker.inspect.process_state import process_state
from tests.power_cuts.disk import Disk, NoDiskError, enter_private_mounts

_WRITERS: Final = 4
_OTHERS: Final = 2
_CUTS_A_DISK: Final = 12
_FILES: Final = 1 << 16  # of a writer, on one disk
_RECORD: Final = 512


def content(file: int, records: int) -> bytes:
    """Return the records with these numbers, from 0 on, of a file with this number."""
    return b"".join(
        (file << 32 | number).to_bytes(8, "little") * (_RECORD // 8)
        for number in range(records)
    )


def write(folder: Path, noted: memoryview, chance: random.Random) -> None:
    """Append to one file after another; note how many of its records are on disk."""
    folder.mkdir(exist_ok=True)
    fds = [os.open(each, os.O_RDONLY) for each in (folder, folder.parent)]
    first = sum(1 for path in folder.iterdir() if not path.suffix)
    for file in itertools.count(first):
        path = folder / f"{file:08d}"
        fd, records, least = os.open(path, os.O_RDWR | os.O_CREAT), 0, 0
        while records < chance.randint(5, 60):
            records += chance.randint(1, 3)
            data = content(file, records)[least * _RECORD :]
            os.pwrite(fd, data, least * _RECORD)
            os.fdatasync(fd)
            if not least:
                for directory in fds:
                    os.fsync(directory)
            least = noted[file] = records
        os.close(fd)
        if chance.random() < 0.3:
            copy = path.with_suffix(".copy")
            with copy.open("wb") as written:
                written.write(content(file, records))
                written.flush()
                os.fsync(written.fileno())
            copy.rename(path)
            if chance.random() < 0.5:
                os.fsync(fds[0])


def disturb(folder: Path, chance: random.Random) -> None:
    """Create, replace, rename and remove files, some of them forced to disk."""
    folder.mkdir(exist_ok=True)
    for number in itertools.count():
        path = folder / f"file-{chance.randint(0, 5)}"
        kind = chance.random()
        if kind < 0.5:
            other = path.with_suffix(".new")
            with other.open("wb") as file:
                file.write(chance.randbytes(chance.randint(1, 9000)))
                if chance.random() < 0.5:
                    os.fsync(file.fileno())
            other.rename(path)
        elif kind < 0.8:
            path.unlink(missing_ok=True)
        else:
            made = folder / f"{os.getpid()}-{number}"
            made.mkdir()
            (made / "x").write_bytes(b"x" * 100)
            gone = made.rename(made.with_suffix(".deleted"))
            if chance.random() < 0.5:
                shutil.rmtree(gone)
        time.sleep(chance.random() * 0.003)


def start(work: Callable[[], None]) -> int:
    """Run it in a child, until its disk fails or it is killed; return its id."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(OSError):
        work()
    os._exit(0)


def cut_once(disk: Disk, noted: list[memoryview], chance: random.Random) -> None:
    """Cut the power while all of them write; let it return."""
    seeds = [chance.getrandbits(32) for _ in range(_WRITERS + _OTHERS)]
    children = [
        start(
            lambda number=number, seed=seed: (
                write(
                    disk.path / f"writer-{number}", noted[number], random.Random(seed)
                )
                if number < _WRITERS
                else disturb(disk.path / f"other-{number}", random.Random(seed))
            )
        )
        for number, seed in enumerate(seeds)
    ]
    time.sleep(chance.uniform(0.05, 0.6))
    for pid in children:  # stopped first: see campaign.py
        os.kill(pid, signal.SIGSTOP)
    while any(process_state(pid) not in ("T", "Z") for pid in children):
        time.sleep(0.001)
    disk.cut()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    disk.restore()


def losses(disk: Disk, noted: list[memoryview]) -> list[str]:
    """Return what was noted and is not there; it is not looked for again."""
    found = []
    for number, counts in enumerate(noted):
        for file, records in enumerate(counts.tolist()):
            if not records:
                continue
            path = disk.path / f"writer-{number}" / f"{file:08d}"
            try:
                is_there = path.read_bytes().startswith(content(file, records))
                why = "another content"
            except OSError as error:
                is_there, why = False, str(error)
            if not is_there:
                found.append(f"{path.name} of writer {number}: {why}")
                counts[file] = 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="plain-files", description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of all that is random")
    parser.add_argument("--fast-commit", action="store_true", help="mkfs -O that")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="plain-files-"))
    until = time.monotonic() + arguments.minutes * 60
    cuts, found = 0, []
    try:
        enter_private_mounts()
        (folder / "power").mkdir()
        disk = Disk(folder / "power")
        while not found and time.monotonic() < until:
            disk.make(chance, fast_commit=arguments.fast_commit)
            noted = [
                memoryview(mmap.mmap(-1, 4 * _FILES)).cast("I") for _ in range(_WRITERS)
            ]
            for _ in range(_CUTS_A_DISK):
                cuts += 1
                cut_once(disk, noted, chance)
                found += losses(disk, noted)
            print(f"{cuts} cuts, the last of them on ext4 with {disk.kind}", flush=True)
        disk.close()
    except NoDiskError as error:
        if not cuts:
            print(f"no power can be cut here: {error}", file=sys.stderr)
            return 3
        found.append(f"after cut {cuts}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for text in found:
        print("LOST:", text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
