"""`mpbroker dump`: show segments and their indexes as kafka-dump-log does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Final

import click

from mpbroker.cli import index_dump
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import format_option
from mpbroker.cli.output import print_json_line
from mpbroker.cli.segment_dump import DumpOptions, SegmentDump, open_bytes

_SUFFIXES: Final = (".log", ".index", ".timeindex")

_HELP = """\
Show log segments and index files as kafka-dump-log does.

FILE is a .log, .index or .timeindex file, or the directory of a partition, which stands
for all such files in it. An index is compared with its segment.

Nothing is locked or written, so the files of a running broker can be shown. Its active
segment may then end in the middle of a batch.

--format json writes one object a line, for each batch or entry. Keys and values that
are not UTF-8 are {"base64": "..."} in it; as text they are written as they are.

Exits with 1 if a file is damaged, and with 10 if there is no such file.
"""


@click.command("dump", help=_HELP)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="FILE...")
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
@format_option
def command(
    files: Sequence[Path],
    file_list: str | None,
    deep_iteration: bool,
    print_data_log: bool,
    skip_record_metadata: bool,
    index_sanity_check: bool,
    verify_index_only: bool,
    output_format: str,
) -> int:
    paths = _expand(
        [*files, *(Path(name) for name in (file_list or "").split(",") if name)]
    )
    options = DumpOptions(
        deep_iteration or print_data_log or skip_record_metadata,
        print_data_log,
        skip_record_metadata,
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
    sys.stdout.flush()
    for line in [*dump.notes, *dump.problems]:
        print(line, file=sys.stderr)
    return ExitCode.ERROR if dump.problems else ExitCode.OK


def _expand(paths: Sequence[Path]) -> list[Path]:
    if not paths:
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
    """Writes files to stdout, and keeps the messages for stderr until the end."""

    def __init__(
        self, options: DumpOptions, sanity_only: bool, verify_only: bool, as_json: bool
    ) -> None:
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._options = options
        self._sanity_only = sanity_only
        self._verify_only = verify_only
        self._as_json = as_json

    def file(self, path: Path) -> None:
        """Dump one file.

        Raises:
            CliError: its name is not that of a file of a segment.
            OSError: it, or the segment of an index, cannot be read.
        """
        if path.suffix not in _SUFFIXES:
            raise CliError(f"{path}: not one of {', '.join(_SUFFIXES)}")
        stem = path.stem
        if not (stem.isascii() and stem.isdigit()):
            raise CliError(
                f"{path}: the name of a segment file is its base offset, in 20 digits"
            )
        view = open_bytes(path)
        self._say(f"Dumping {path}")
        if path.suffix == ".log":
            self._say(f"Log starting offset: {int(stem)}")
            self._segment(path, view)
        elif path.suffix == ".index":
            self._offset_index(path, view, int(stem))
        else:
            self._time_index(path, view, int(stem))

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
