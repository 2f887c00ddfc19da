"""Maintain a pipeline's tables: ``mpbroker pipeline maintain FILE``.

It merges small files, deletes old rows, expires old snapshots, and deletes files that
no snapshot names. It needs no Spark, and may run beside the pipeline:

    iceberg, delta   each step is a commit to the table. If another writer's commit
                     defeats it, the step is repeated on the newest version. A file is
                     deleted at the earliest a day after it was written: a younger one
                     may belong to a batch that is not committed yet.
    parquet          a lock lets one process at a time merge and delete files; a merge
                     that was killed is finished by the next that has the lock. Rows go
                     by whole files, once all of their rows are old. An object store has
                     no lock: there the pipeline itself does both, when it merges.

If it is killed, each step is either done or not, and the next run does the rest.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from pyarrow import fs

from mpbroker.spark.file_systems import find
from mpbroker.spark.pipeline.description import Maintain, Table, load
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import open_directory, store_errors
from mpbroker.spark.pipeline.tables import iceberg
from mpbroker.spark.pipeline.tables.lake import (
    LakeTable,
    ParquetTable,
    check_delta,
    mark_may_be_empty,
    newest_parquet_files,
    open_delta,
)

# How often a step is tried if other writers commit first.
_TRIES: Final = 20
# Younger files may belong to a batch that will be committed.
_YOUNG_S: Final = 24 * 3600
_Found = TypeVar("_Found")


@dataclass
class Done:
    """The results of maintaining one table.

    A count is None if the table's format or the pipeline's TOML file has no such step.

    Attributes:
        before: the number of data files before small ones were merged.
        after: the number of data files after that.
        rows: the number of rows deleted because of their age; in a Parquet directory
            the number of files deleted because of it.
        snapshots: the number of expired snapshots.
        files: the number of deleted files, which no snapshot named any more.
    """

    before: int = 0
    after: int = 0
    rows: int | None = None
    snapshots: int | None = None
    files: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.before} files, now {self.after}"]
        for name, what in (
            ("rows", "old rows deleted"),
            ("snapshots", "snapshots expired"),
            ("files", "unused files deleted"),
        ):
            if getattr(self, name):
                parts.append(f"{getattr(self, name):,} {what}")
        return "; ".join(parts)


def maintain_file(path: str | Path) -> Mapping[str, object]:
    """Maintain the tables of the pipeline that a TOML file describes.

    Returns:
        The fields of each table's `Done` as a dict, by the table's path.

    Raises:
        DescriptionError: the file is wrong.
        PipelineError: the job writes no table, or a table cannot be maintained.
    """
    description = load(path)
    table = description.table
    if description.job not in ("ingest", "aggregate") or table is None:
        raise PipelineError(f"job {description.job} fills no table to maintain")
    progress = Progress(description.name)
    default = "_timestamp" if description.job == "ingest" else "window_start"
    event_time = table.event_time or default
    found: dict[str, object] = {}
    for each, column in (
        (table, event_time),
        (description.dead_letter, "_timestamp"),
        (description.late, event_time),
    ):
        if each is not None:
            done = maintain_table(
                each,
                description.maintain,
                column,
                description.name,
                by_day="date" not in description.value.fields,
            )
            progress.say(f"{each.path}: {done}")
            found[each.path] = vars(done)
    return found


def maintain_table(
    table: Table,
    settings: Maintain,
    event_time: str,
    name: str = "maintain",
    now_s: float | None = None,
    by_day: bool = True,
) -> Done:
    """Merge a table's small files; remove old rows, old snapshots and unused files.

    Args:
        event_time: the column by which rows become old.
        name: the pipeline's name.
        now_s: the time, in seconds since 1970, from which ages count; None: now.
        by_day: whether a partition column "date" is the day of the event time.

    Raises:
        PipelineError: the table cannot be maintained; what was done until then stays.
    """
    step = {"parquet": _parquet, "delta": _delta, "iceberg": _iceberg}[table.format]
    with store_errors(table.path):
        now_s = now_s or time.time()
        return step(_Task(table, settings, event_time, name, now_s, by_day), Done())


@dataclass(frozen=True)
class _Task:
    table: Table
    settings: Maintain
    event_time: str
    name: str
    now_s: float
    by_day: bool

    @property
    def target_bytes(self) -> int:
        return int(self.table.compact_mb * 1024 * 1024)

    @property
    def oldest_row(self) -> datetime.datetime | None:
        """The event time below which a row is deleted; None: rows of any age stay."""
        keep_s = self.settings.keep_rows_s
        return _utc(self.now_s - keep_s) if keep_s else None

    @property
    def keep_files_s(self) -> float:
        return max(_YOUNG_S, self.settings.keep_snapshots_s)


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _again(
    attempt: Callable[[], _Found], lost: tuple[type[Exception], ...], what: str
) -> _Found:
    """Call ``attempt`` until no other writer's commit defeats it; return its result.

    Args:
        attempt: a function that changes the table.
        lost: the errors that say that another writer was faster.
        what: the beginning of an error's message.

    Raises:
        PipelineError: other writers were faster each time.
    """
    for number in range(1, _TRIES + 1):
        try:
            return attempt()
        except lost as error:
            if number == _TRIES:
                raise PipelineError(
                    f"{what}: other writers were faster {_TRIES} times: run it again"
                    " when less is written"
                ) from error
    raise AssertionError("the loop above returns or raises")


# -- Parquet ---------------------------------------------------------------------------


def _parquet(task: _Task, done: Done) -> Done:
    files, root = open_directory(task.table.path)
    if not isinstance(files, fs.LocalFileSystem):
        raise PipelineError(
            f"{task.table.path}: a Parquet directory on an object store has no lock, so"
            " its own pipeline does this after each table.compact_every batches; or use"
            ' format = "delta" or "iceberg"'
        )
    there = newest_parquet_files(files, root)  # the newest has all columns
    if not there:
        return done
    schema = pq.read_schema(there[0], filesystem=files)
    table = _StoredParquet(replace(task.table, partition_by=()), schema, task.name)
    oldest = task.oldest_row
    if oldest is not None:
        done.rows = _delete_old_files(table, task.event_time, oldest)
        if done.rows < 0:
            raise PipelineError(
                f"{task.table.path}: its files are being merged by another process; run"
                " this again when that is done"
            )
    done.before, done.after = table.compact()
    return done


def _delete_old_files(
    table: ParquetTable, event_time: str, oldest: datetime.datetime
) -> int:
    def is_old(path: str) -> bool:
        newest = _newest(pq.read_metadata(path, filesystem=table.files), event_time)
        return newest is not None and newest < oldest

    return table.delete_files(is_old)


def drop_old_rows(
    table: LakeTable,
    settings: Maintain,
    event_time: str,
    now_s: float | None = None,
) -> int:
    """Delete a table's files with old rows, if only its own pipeline may do so.

    That is so for a Parquet directory on an object store, which has no lock. All other
    tables are left to `maintain_table`.

    Args:
        event_time: the column by which rows become old.
        now_s: the time, in seconds since 1970, from which ages count; None: now.

    Returns:
        The number of deleted files.
    """
    if not (
        settings.keep_rows_s
        and isinstance(table, ParquetTable)
        and not isinstance(table.files, fs.LocalFileSystem)
    ):
        return 0
    oldest = _utc((now_s or time.time()) - settings.keep_rows_s)
    return _delete_old_files(table, event_time, oldest)


class _StoredParquet(ParquetTable):
    """A Parquet directory as it is, whatever the TOML file says of its columns."""

    def check_schema(self) -> None:
        """Do nothing: accept the columns that the files have."""


def _newest(metadata: Any, column: str) -> datetime.datetime | None:
    """Return the latest time in a Parquet file's column, from the file's statistics.

    None: the file has no such column, or the statistics do not tell it.

    Args:
        metadata: the file's metadata.
    """
    found: datetime.datetime | None = None
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        chosen = [each for each in columns if each.path_in_schema == column]
        statistics = chosen[0].statistics if chosen else None
        if statistics is None or not statistics.has_min_max or statistics.null_count:
            return None
        value = statistics.max
        if not isinstance(value, datetime.datetime):
            value = datetime.datetime.combine(value, datetime.time(), datetime.UTC)
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.UTC)
        found = value if found is None else max(found, value)
    return found


# -- Delta -----------------------------------------------------------------------------


def _delta(task: _Task, done: Done) -> Done:
    check_delta()
    from deltalake.exceptions import CommitFailedError

    table = task.table
    if open_delta(table.path) is None:
        return done
    lost = (CommitFailedError,)
    oldest = task.oldest_row
    if oldest is not None:
        mark_may_be_empty(table.path)
        predicate = _delta_predicate(open_delta(table.path), task, oldest)
        metrics = _again(
            lambda: open_delta(table.path).delete(predicate), lost, table.path
        )
        done.rows = metrics.get("num_deleted_rows") or 0
    done.before = len(open_delta(table.path).file_uris())
    _again(
        lambda: open_delta(table.path).optimize.compact(target_size=task.target_bytes),
        lost,
        table.path,
    )
    stored = open_delta(table.path)
    done.after = len(stored.file_uris())
    deleted = stored.vacuum(
        retention_hours=int(task.keep_files_s / 3600),
        dry_run=False,
        enforce_retention_duration=False,
        full=True,
    )
    done.files = len(deleted)
    # Versions older than delta.logRetentionDuration go, if a checkpoint has them.
    stored.create_checkpoint()
    stored.cleanup_metadata()
    return done


def _delta_predicate(stored: Any, task: _Task, oldest: datetime.datetime) -> str:
    column = task.event_time
    kinds = {field.name: field.type for field in pa.schema(stored.schema().to_arrow())}
    if column not in kinds:
        raise PipelineError(
            f"maintain.keep_rows: the table has no column {column!r}; set"
            " table.event_time to the column that says how old a row is"
        )
    if pa.types.is_date(kinds[column]):
        return f"{column} < DATE '{oldest.date()}'"
    text = oldest.strftime("%Y-%m-%dT%H:%M:%SZ")
    predicate = (
        f"{column} < arrow_cast('{text}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
    )
    if task.by_day and "date" in stored.metadata().partition_columns:
        # Files of later days need not be read.
        predicate = f"date <= DATE '{oldest.date()}' AND {predicate}"
    return predicate


# -- Iceberg ---------------------------------------------------------------------------


def _iceberg(task: _Task, done: Done) -> Done:
    from pyiceberg.exceptions import (
        CommitFailedException,
        NoSuchNamespaceError,
        NoSuchTableError,
        ValidationException,
    )

    lost = (CommitFailedException, ValidationException)
    with iceberg.explained(task.table):
        catalog = iceberg.load_iceberg_catalog(task.table)

        def opened() -> Any:
            return catalog.load_table(task.table.identifier)

        try:
            opened()
        except (NoSuchTableError, NoSuchNamespaceError):
            return done
        what = task.table.path
        oldest = task.oldest_row
        if oldest is not None:
            limit = oldest  # for mypy
            mark_may_be_empty(what)
            done.rows = _again(
                lambda: _delete_old(opened(), task.event_time, limit), lost, what
            )
        done.before = len(list(opened().scan().plan_files()))
        for group in _small_files(opened(), task.target_bytes):
            merged = _merged(opened(), group)
            _again(lambda g=group, m=merged: _replace(opened(), g, m), lost, what)  # type: ignore[misc]
        done.after = len(list(opened().scan().plan_files()))
        done.snapshots = _again(lambda: _expire(opened(), task), lost, what)
        done.files = _delete_unused(opened(), task)
    return done


def _delete_old(stored: Any, column: str, oldest: datetime.datetime) -> int:
    from pyiceberg.expressions import LessThan
    from pyiceberg.types import DateType

    if column not in stored.schema().column_names:
        raise PipelineError(
            f"maintain.keep_rows: the table has no column {column!r}; set"
            " table.event_time to the column that says how old a row is"
        )
    is_date = isinstance(stored.schema().find_type(column), DateType)
    less: Any = LessThan  # pydantic's types are those of its JSON
    old = less(column, str(oldest.date()) if is_date else oldest.isoformat())
    count = int(stored.scan(row_filter=old).count())
    if count:
        stored.delete(old)
    return count


def _small_files(stored: Any, target: int) -> Iterator[list[Any]]:
    """Yield groups of small files, each to be merged into one file.

    A group has the scan tasks of files that are in the same partition.

    Args:
        target: the size of a merged file, in bytes.
    """
    groups: dict[Any, list[Any]] = {}
    for each in stored.scan().plan_files():
        if (
            each.file.file_size_in_bytes < target // 2
            and each.file.spec_id == stored.spec().spec_id
            and not each.delete_files
        ):
            groups.setdefault(tuple(each.file.partition), []).append(each)
    for tasks in groups.values():
        group: list[Any] = []
        size = 0
        for each in tasks:
            if size >= target:
                yield group
                group, size = [], 0
            group.append(each)
            size += each.file.file_size_in_bytes
        if len(group) > 1:
            yield group


def _merged(stored: Any, tasks: list[Any]) -> list[Any]:
    """Write the rows of several files to a new file, which no snapshot names yet."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files

    scan = ArrowScan(stored.metadata, stored.io, stored.schema(), AlwaysTrue())
    rows = scan.to_table(tasks)
    return list(_dataframe_to_data_files(stored.metadata, rows, stored.io))


def _replace(stored: Any, tasks: list[Any], merged: list[Any]) -> None:
    """Replace small data files by merged ones, in one commit to the Iceberg table.

    Do nothing if the table lacks one of the files now: another writer replaced it.

    Args:
        tasks: the scan tasks of the files to replace.
        merged: the data files that have the same rows.
    """
    live = {each.file.file_path for each in stored.scan().plan_files()}
    if any(each.file.file_path not in live for each in tasks):
        return  # another writer has replaced one; the merged file stays unused
    with (
        stored.transaction() as change,
        change.update_snapshot({"mpbroker.maintain": "compact"}).overwrite() as files,
    ):
        for each in tasks:
            files.delete_data_file(each.file)
        for new in merged:
            files.append_data_file(new)


def _expire(stored: Any, task: _Task) -> int:
    """Expire old snapshots, but keep each pipeline's last one, and those with a name.

    Names are branches and tags. Return the number of expired snapshots.
    """
    before_ms = (task.now_s - task.settings.keep_snapshots_s) * 1000
    kept = {ref.snapshot_id for ref in stored.refs().values()}
    seen: set[str] = set()
    for snapshot in iceberg.ancestors(stored.metadata):
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        application = summary.get(iceberg.APPLICATION)
        if application is not None and application not in seen:
            seen.add(application)
            kept.add(snapshot.snapshot_id)
    old = [
        each.snapshot_id
        for each in stored.snapshots()
        if each.timestamp_ms < before_ms and each.snapshot_id not in kept
    ]
    if old:
        stored.maintenance.expire_snapshots().by_ids(old).commit()
    return len(old)


def _delete_unused(stored: Any, task: _Task) -> int:
    """Delete old files in the table's directories that its metadata does not name.

    Return the number of deleted files.
    """
    used = {find(each)[1] for each in _used(stored)}
    files, root = find(stored.location())
    before = _utc(task.now_s - task.keep_files_s)
    count = 0
    for directory, suffixes in (
        ("data", (".parquet",)),
        ("metadata", (".avro", ".metadata.json")),
    ):
        selector = fs.FileSelector(
            f"{root}/{directory}", recursive=True, allow_not_found=True
        )
        for each in files.get_file_info(selector):
            if (
                each.type == fs.FileType.File
                and each.path.endswith(suffixes)
                and each.path not in used
                and each.mtime < before
            ):
                files.delete_file(each.path)
                count += 1
    return count


def _used(stored: Any) -> Iterator[str]:
    """Yield the paths of all files that the table's metadata names."""
    yield stored.metadata_location
    for entry in stored.metadata.metadata_log:
        yield entry.metadata_file
    seen: set[str] = set()
    for snapshot in stored.snapshots():
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(stored.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            yield manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(stored.io, discard_deleted=True):
                yield entry.data_file.file_path
