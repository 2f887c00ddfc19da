"""`mpbroker dump`: show segments and their indexes as kafka-dump-log does."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from mpbroker.base.storage_errors import RemoteObjectMissingError
from mpbroker.cli import index_dump
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import format_option
from mpbroker.cli.output import print_json_line
from mpbroker.cli.segment_dump import DumpOptions, SegmentDump, open_bytes

_SNAPSHOT_SUFFIX: Final = ".checkpoint"
_SUFFIXES: Final = (".log", ".index", ".timeindex", _SNAPSHOT_SUFFIX)
_BOOTSTRAP_SNAPSHOT: Final = "bootstrap"
# A segment's base offset; the name of an object in a remote store also has a copy's id.
_SEGMENT_NAME: Final = re.compile(r"([0-9]+)(?:-[0-9a-f]{32})?")
_FETCH_BYTES: Final = 8 * 1024 * 1024
_SNAPSHOT_NAME: Final = re.compile(r"([0-9]{20})-([0-9]{10})")

_HELP = """\
Show log segments and index files as kafka-dump-log does.

FILE is a .log, .index or .timeindex file, a .checkpoint (a snapshot of KRaft's
metadata), or the directory of a partition, which stands for all such files in it. An
index is compared with its segment. --cluster-metadata-decoder shows the records of the
metadata log, in __cluster_metadata-0. FILE may be the URL of a .log object in a remote
store, such as s3://BUCKET/PREFIX/TOPIC-ID/0/00000000000000000042-ID.log.

Nothing is locked or written, so the files of a running broker can be shown. Its active
segment may then end in the middle of a batch.

--format json writes one object a line, for each batch or entry. Keys and values that
are not UTF-8 are {"base64": "..."} in it; as text they are written as they are.

Exits with 1 if a file is damaged, and with 10 if there is no such file.
"""


@click.command("dump", help=_HELP)
@click.argument("files", nargs=-1, type=click.Path(), metavar="FILE...")
@click.option(
    "--files",
    "file_list",
    metavar="FILE,...",
    help="More files, in kafka-dump-log's way.",
)
@click.option("--deep-iteration", is_flag=True, help="Show every record.")
@click.option(
    "--print-data-log", is_flag=True, help="Show every record with key and value."
)
@click.option(
    "--skip-record-metadata", is_flag=True, help="Show key and value of records only."
)
@click.option(
    "--index-sanity-check", is_flag=True, help="Check the form of an index only."
)
@click.option(
    "--verify-index-only", is_flag=True, help="Compare an index with its segment only."
)
@click.option(
    "--cluster-metadata-decoder",
    "cluster_metadata",
    is_flag=True,
    help="Show the fields of every record of a metadata log or snapshot.",
)
@format_option
def command(
    files: Sequence[str],
    file_list: str | None,
    deep_iteration: bool,
    print_data_log: bool,
    skip_record_metadata: bool,
    index_sanity_check: bool,
    verify_index_only: bool,
    cluster_metadata: bool,
    output_format: str,
) -> int:
    names = [*files, *(name for name in (file_list or "").split(",") if name)]
    urls = [name for name in names if "://" in name]
    paths = _expand([Path(name) for name in names if name not in urls], urls)
    options = DumpOptions(
        deep_iteration or print_data_log or skip_record_metadata or cluster_metadata,
        print_data_log,
        skip_record_metadata,
        cluster_metadata,
    )
    dump = _Dump(
        options, index_sanity_check, verify_index_only, output_format == "json"
    )
    for path in paths:
        try:
            dump.file(path)
        except OSError as error:
            if error.filename is None:
                raise  # standard output cannot be written
            raise _unreadable(path, error) from error
    for url in urls:
        with TemporaryDirectory() as directory:
            dump.file(_fetch(url, directory), url)
    sys.stdout.flush()
    for line in [*dump.notes, *dump.problems]:
        print(line, file=sys.stderr)
    return ExitCode.ERROR if dump.problems else ExitCode.OK


def _fetch(url: str, directory: str) -> Path:
    """Copy an object of a remote store into a directory; return the path of the copy.

    Raises:
        CliError: there is no such object, it is no segment, or a package is missing.
        RemoteStorageError: the store cannot be read.
    """
    place, _, name = url.rpartition("/")
    if not name.endswith(".log"):
        raise CliError(f"{url}: not a .log object")
    try:
        from mpbroker.storage.remote.object_store import ObjectStore
    except ModuleNotFoundError as error:
        raise CliError(
            f"{error.name} is missing: pip install 'mpbroker-server[tiered]'"
        ) from error
    store = ObjectStore(place)
    path = Path(directory, name)
    try:
        size = store.size(name)
    except RemoteObjectMissingError as error:
        raise CliError(str(error), ExitCode.NOT_FOUND) from error
    with path.open("wb") as file:
        for start in range(0, size, _FETCH_BYTES):
            file.write(store.get_range(name, start, min(_FETCH_BYTES, size - start)))
    return path


def _expand(paths: Sequence[Path], urls: Sequence[str]) -> list[Path]:
    if not paths and not urls:
        raise click.UsageError("name at least one FILE")
    expanded: list[Path] = []
    for path in paths:
        try:
            # Before the name is checked: a mistyped directory should be "not found".
            if not S_ISDIR(path.stat().st_mode):
                expanded.append(path)
                continue
            found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        except OSError as error:  # such as a name that is too long
            raise _unreadable(path, error) from error
        if not found:
            raise CliError(f"{path}: no segments in this directory", ExitCode.NOT_FOUND)
        expanded += found
    return expanded


def _unreadable(path: Path, error: OSError) -> CliError:
    missing = isinstance(error, FileNotFoundError)
    return CliError(
        f"{error.filename or path}: {(error.strerror or str(error)).lower()}",
        ExitCode.NOT_FOUND if missing else ExitCode.ERROR,
    )


class _Dump:
    """Dumps files to stdout, and collects the messages that go to stderr at the end."""

    def __init__(
        self, options: DumpOptions, sanity_only: bool, verify_only: bool, as_json: bool
    ) -> None:
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._options = options
        self._sanity_only = sanity_only
        self._verify_only = verify_only
        self._as_json = as_json

    def file(self, path: Path, name: str = "") -> None:
        """Dump one file.

        Args:
            path: the file.
            name: the file's name in the output; "": the path.

        Raises:
            CliError: the name is not that of a segment, an index or a snapshot.
            OSError: the file, or the segment of an index, cannot be read.
        """
        if path.suffix not in _SUFFIXES:
            raise CliError(f"{path}: not one of {', '.join(_SUFFIXES)}")
        stem = path.stem
        if path.suffix == _SNAPSHOT_SUFFIX:
            self._snapshot(path)
            return
        named = _SEGMENT_NAME.fullmatch(stem)
        if named is None:
            raise CliError(
                f"{path}: the name of a segment file is its base offset, in 20 digits"
            )
        view = open_bytes(path)
        self._say(f"Dumping {name or path}")
        base = int(named[1])
        if path.suffix == ".log":
            self._say(f"Log starting offset: {base}")
            self._segment(path, view)
        elif path.suffix == ".index":
            self._offset_index(path, view, base)
        else:
            self._time_index(path, view, base)

    def _snapshot(self, path: Path) -> None:
        found = _SNAPSHOT_NAME.fullmatch(path.stem)
        if found is None and path.stem != _BOOTSTRAP_SNAPSHOT:
            raise CliError(
                f"{path}: the name of a snapshot is its end offset in 20 digits, and"
                " its epoch in 10"
            )
        view = open_bytes(path)
        self._say(f"Dumping {path}")
        if found is None:
            self._say("KRaft bootstrap snapshot")
        else:
            offset, epoch = map(int, found.groups())
            self._say(f"Snapshot end offset: {offset}, epoch: {epoch}")
        self._segment(path, view)

    def _say(self, line: str) -> None:
        if not self._as_json:
            # As bytes, because a file name need not be UTF-8.
            sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")

    def _segment(self, path: Path, view: memoryview) -> None:
        dump = SegmentDump(path, self._options)
        if self._as_json:
            for entry in dump.objects(view):
                print_json_line(entry)
        else:
            dump.write(view, sys.stdout.buffer.write)
        self.notes += dump.notes
        self.problems += dump.problems

    def _offset_index(self, path: Path, view: memoryview, base_offset: int) -> None:
        entries = index_dump.read_offset_index(view, base_offset)
        if not entries:
            self._say(f"{path} is empty.")
            return
        problems = index_dump.check_sizes(path, view, time_index=False)
        if not self._sanity_only:
            segment = index_dump.sibling(path, ".log")
            problems += index_dump.check_offset_index(path, entries, segment)
        self._index(path, [entry._asdict() for entry in entries], problems)

    def _time_index(self, path: Path, view: memoryview, base_offset: int) -> None:
        entries = index_dump.read_time_index(view, base_offset)
        problems = index_dump.check_sizes(path, view, time_index=True)
        if not self._sanity_only:
            offset_entries = index_dump.read_offset_index(
                index_dump.sibling(path, ".index"), base_offset
            )
            segment = index_dump.sibling(path, ".log")
            problems += index_dump.check_time_index(
                path, entries, offset_entries, segment
            )
        self._index(path, [entry._asdict() for entry in entries], problems)

    def _index(
        self, path: Path, entries: list[dict[str, Any]], problems: list[str]
    ) -> None:
        self.problems += problems
        if self._sanity_only:
            if not problems:
                self._say(f"{path} passed sanity check.")
        elif self._as_json:
            for entry in entries:
                print_json_line({"file": str(path), **entry})
        elif not self._verify_only:
            for entry in entries:
                self._say(" ".join(f"{name}: {value}" for name, value in entry.items()))
