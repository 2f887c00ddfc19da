"""Commit batches to tables, each batch once, even if processes are killed.

A batch is identified by the id of the checkpoint's query and the batch id. Executors
write its files (`staging`): to a staging area for Parquet and for changes by key, else
to their final place. The driver then commits them by creating one file, with a rename
or as one object:

    parquet   <table>/_mpbroker/<pipeline>/batch-<id>.json, a manifest: it lists staged
              files and their places in the table. The driver moves the files after the
              commit; if it is killed, the next start moves the rest. Readers see the
              files of a batch appear one by one.
    delta     an entry of the table's own log, with delta-rs. The batch id is stored in
              the entry as an application transaction. Readers see a batch as a whole.
    iceberg   a snapshot of the table (`iceberg`). Readers see a batch as a whole.

A batch that is already committed is ignored. Readers of Parquet directories, such as
Spark, and Delta's vacuum ignore names that begin with "_".
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from mpbroker.spark.pipeline.description import Table
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import (
    DELETED,
    PARQUET,
    STAGED,
    FileWriter,
    PlacedFiles,
    hive_directory,
    open_directory,
    partition_columns,
    table_schema,
)
from mpbroker.spark.pipeline.tables.changes import read_changes

if TYPE_CHECKING:
    from deltalake import CommitProperties

_OWN: Final = "_mpbroker"
# The directory of compactions, which all pipelines that share a table use. No pipeline
# has this name: a name cannot begin with "_".
_COMPACT: Final = "_compact"
# A file that says that a table may lawfully have no rows: old ones are deleted, or the
# user moves files away.
_MAY_BE_EMPTY: Final = "_may_be_empty"
# How often a change by key is tried if other writers commit at the same time.
COMMIT_TRIES: Final = 20
_KEPT_MANIFESTS: Final = 20  # only the newest is used; the others help to find faults


class LakeTable(ABC):
    """A table that one pipeline's driver writes to.

    Attributes:
        evolves: whether `evolve` adds the pipeline's new columns to the table.
    """

    evolves = False

    def __init__(self, table: Table, schema: pa.Schema, name: str) -> None:
        """Open the table and check its columns; change nothing.

        Args:
            schema: the rows' columns, without the computed partition column "date".
            name: the pipeline's name.

        Raises:
            PipelineError: the table has other columns, or cannot be read.
        """
        self.table = table
        self.name = name
        self.partition_fields = partition_columns(table, schema)
        self.schema = table_schema(table, schema)
        self.files, self.root = open_directory(table.path)
        self._own = f"{self.root}/{_OWN}/{name}"
        self._query = ""
        self.check_schema()

    # -- the pipeline that owns the table ----------------------------------------------

    def claim(self, query: str) -> None:
        """Bind the table to a stream's checkpoint; end or undo a killed driver's batch.

        Args:
            query: the id of the checkpoint's query.

        Raises:
            PipelineError: the table has batches of another checkpoint.
        """
        path = f"{self._own}/query.json"
        known = self._read_json(path)
        if known is not None and known["query"] != query:
            raise PipelineError(
                f"{self.table.path} was filled by pipeline {self.name!r} with another"
                f" checkpoint (query {known['query']}): with this one its rows would be"
                " written twice. Restore that checkpoint, or choose another"
                " pipeline.name or table"
            )
        self._query = query
        if known is None:
            self.make_room()
            self._write_json(path, {"query": query})
        self.recover()
        self.sweep()
        self.evolve()

    def check_claim(self, query: str | None) -> None:
        """Check whether `claim` would succeed; change nothing.

        Args:
            query: the id of the checkpoint's query; None if the checkpoint is new.

        Raises:
            PipelineError: the table has batches of another checkpoint.
        """
        known = self._read_json(f"{self._own}/query.json")
        if known is not None and known["query"] != query:
            raise PipelineError(
                f"{self.table.path} holds rows of pipeline {self.name!r} and another"
                " checkpoint: with this one they would be written twice. Restore that"
                " checkpoint, or choose another pipeline.name or table"
            )

    def check_filled(self, query: str, checkpoint: str) -> None:
        """Check whether the table has the batches that a checkpoint has committed.

        A pipeline may have another name than before.

        Args:
            query: the id of the checkpoint's query.
            checkpoint: the checkpoint's path, for the error.

        Raises:
            PipelineError: the table is new, was removed, or all its files or rows were.
                It would get the records that come next only.
        """
        selector = fs.FileSelector(f"{self.root}/{_OWN}", allow_not_found=True)
        own = [
            each.path
            for each in self.files.get_file_info(selector)
            if (self._read_json(f"{each.path}/query.json") or {}).get("query") == query
        ]
        if self.exists() and own:
            mark = f"{_OWN}/{_MAY_BE_EMPTY}"
            there = self.files.get_file_info(f"{self.root}/{mark}").type
            lost = "" if there == fs.FileType.File else self._lost(own)
            if lost:
                raise PipelineError(
                    f"all {lost} of {self.table.path} were removed, and checkpoint"
                    f" {checkpoint!r} has read their records already: the table would"
                    f" only get those that come next. Restore the {lost}, or remove"
                    " what is left of the table and set pipeline.checkpoint to a new"
                    " directory: all records are read again then. If you removed them"
                    " on purpose, say so by an empty file"
                    f" {self.table.path}/{mark}"
                )
            return
        raise PipelineError(
            f"{self.table.path} lacks the records that checkpoint {checkpoint!r} has"
            " read already: it would only get those that come next. Restore the table,"
            " or remove what is left of it and set pipeline.checkpoint to a new"
            " directory: all records are read again then"
        )

    def exists(self) -> bool:
        """Return whether the table is there; a directory always is."""
        return True

    @abstractmethod
    def _lost(self, own: Sequence[str]) -> str:
        """Return what somebody certainly removed from the table, leaving nothing.

        That is "files", which the table still names, or "rows", by a commit; or "".

        Args:
            own: the directories of the pipelines that wrote to it with this checkpoint.
        """

    def staging(self, batch_id: int) -> str:
        """Return the directory where executors write a batch's files until the commit.

        It is a path or URI.
        """
        return f"{self.table.path}/{_OWN}/{self.name}/staging/{batch_id}"

    def make_room(self) -> None:  # noqa: B027 - only Iceberg needs anything
        """Create the table's namespace in its catalog, before a file is written."""

    def sweep(self) -> None:
        """Remove files that executors wrote for batches that were never committed."""
        path = f"{self._own}/staging"
        if self.files.get_file_info(path).type == fs.FileType.Directory:
            self.files.delete_dir(path)

    # -- different for each format -----------------------------------------------------

    @abstractmethod
    def check_schema(self) -> None:
        """Raise PipelineError if the table exists and has other columns."""

    @abstractmethod
    def recover(self) -> None:
        """Make the table ready for batches; finish a commit that a kill interrupted."""

    def evolve(self) -> None:
        """Add the pipeline's new columns and nested fields to the table."""
        assert not self.evolves

    @abstractmethod
    def has_batch(self, batch_id: int) -> bool:
        """Return whether a batch is in the table already."""

    @abstractmethod
    def commit(
        self, batch_id: int, files: Sequence[dict[str, Any]], offsets: str = ""
    ) -> None:
        """Make all staged files of a batch part of the table.

        Args:
            files: the tasks' reports, a dict for each file by the columns of FILES_DDL.
            offsets: the source's offsets at the batch's end, as JSON; they are stored
                for people to read.
        """

    def file_writer(self) -> FileWriter | None:
        """Return the writer of the table's data files; None: `Stager` writes them."""
        return None

    @abstractmethod
    def compact(self) -> tuple[int, int]:
        """Merge small files; return the number of files before and after."""

    @abstractmethod
    def data_files(self) -> list[str]:
        """Return the paths of the files that belong to the table."""

    def uris(self) -> list[str]:
        """Return the same files as `data_files`, as paths or URIs for Spark."""
        return [
            self.table.path + each.removeprefix(self.root) for each in self.data_files()
        ]

    def values_by_file(self) -> dict[str, dict[str, Any]] | None:
        """Return partition values by a file's name, then by column.

        None: the names of the files' directories give them.
        """
        return None

    # -- files -------------------------------------------------------------------------

    def _final_path(self, staged: str, values: dict[str, str | None]) -> str:
        return "/".join(
            filter(None, [hive_directory(values), self._final_name(staged)])
        )

    def _final_name(self, staged: str) -> str:
        name = staged.rpartition("/")[2].removesuffix(STAGED)
        return f"{self.name}-{name}{PARQUET}"

    def _move(self, staged: str, final: str) -> None:
        """Move a staged file to its place, unless it is already there.

        Raises:
            PipelineError: the file is in neither place.
        """
        target = f"{self.root}/{final}"
        if self.files.get_file_info(staged).type == fs.FileType.NotFound:
            if self.files.get_file_info(target).type == fs.FileType.NotFound:
                raise PipelineError(f"{staged} was deleted before it was committed")
            return
        self.files.create_dir(target.rpartition("/")[0], recursive=True)
        self.files.move(staged, target)

    def _read_json(self, path: str) -> Any:
        if self.files.get_file_info(path).type != fs.FileType.File:
            return None
        with self.files.open_input_stream(path) as stream:
            return orjson.loads(stream.read())

    def _write_json(self, path: str, content: Any) -> None:
        """Write content as JSON to a new file; readers never find a part of it."""
        if isinstance(self.files, fs.S3FileSystem):
            # An object appears with the last byte, and there is no rename.
            with self.files.open_output_stream(path) as stream:
                stream.write(orjson.dumps(content))
            return
        self.files.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with self.files.open_output_stream(temporary) as stream:
            stream.write(orjson.dumps(content))
        self.files.move(temporary, path)

    def _refuse_schema(self, found: pa.Schema) -> None:
        """Raise PipelineError if the table has other columns than the pipeline.

        The types must be equal, too. If the table evolves, the pipeline may have more.
        """
        wanted = {field.name: field.type for field in self.schema}
        there = {field.name: field.type for field in found}
        for name in wanted.keys() | there.keys():
            if self.evolves and (
                name not in there or _extends(wanted.get(name), there[name])
            ):
                continue
            if not _same_type(wanted.get(name), there.get(name)):
                raise PipelineError(
                    f"{self.table.path}: column {name!r} is"
                    f" {there.get(name, 'not there')} in the table and"
                    f" {wanted.get(name, 'not there')} in the pipeline. Write to"
                    " another table with a new checkpoint, or change the description"
                )


def _same_type(one: pa.DataType | None, other: pa.DataType | None) -> bool:
    # delta-rs returns "large" and "view" types, which hold the same values.
    def plain(kind: pa.DataType | None) -> str:
        return (
            str(kind)
            .replace("large_", "")
            .replace("_view", "")
            .replace("element", "item")
        )

    return plain(one) == plain(other)


def _extends(wanted: pa.DataType | None, there: pa.DataType) -> bool:
    """Return whether a column's type is the table's, or adds fields to its structs.

    Args:
        wanted: the type of the pipeline's column; None: it has no such column.
        there: the type of the table's column.
    """
    if wanted is None:
        return False
    if pa.types.is_struct(wanted) and pa.types.is_struct(there):
        fields = {field.name: field.type for field in wanted}
        return all(_extends(fields.get(each.name), each.type) for each in there)
    if pa.types.is_map(wanted) and pa.types.is_map(there):
        return _same_type(wanted.key_type, there.key_type) and _extends(
            wanted.item_type, there.item_type
        )
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view)
    if pa.types.is_list(wanted) and any(is_list(there) for is_list in lists):
        return _extends(wanted.value_type, there.value_type)
    return _same_type(wanted, there)


class ParquetTable(LakeTable):
    """A directory of Parquet files; a manifest beside them lists each commit's files.

    Its columns are those of the newest file: older ones may have fewer.
    """

    evolves = True

    def check_schema(self) -> None:
        found = newest_parquet_files(self.files, self.root)
        if found:
            inside = pq.read_schema(found[0], filesystem=self.files)
            names = {field.name for field in self.partition_fields}
            for field in self.partition_fields:
                if f"/{field.name}=" not in found[0]:
                    raise PipelineError(
                        f"{self.table.path} is not partitioned by {field.name}; write"
                        " to another table with a new checkpoint, or change"
                        " table.partition_by"
                    )
                inside = (
                    inside.append(field) if field.name not in inside.names else inside
                )
            if len(names) != found[0].removeprefix(self.root).count("="):
                raise PipelineError(
                    f"{self.table.path} is partitioned by other columns: {found[0]}"
                )
            self._refuse_schema(inside)

    def evolve(self) -> None:
        """Do nothing: each file keeps the columns that it was written with."""

    def _lost(self, own: Sequence[str]) -> str:
        if self.data_files():
            return ""
        # A kill may leave all files staged: those of the first rows, or those that a
        # compaction has merged. The start will move them.
        selector = fs.FileSelector(f"{self.root}/{_OWN}", recursive=True)
        found = [each.path for each in self.files.get_file_info(selector)]
        was_filled = any(
            self._read_json(path)["add"]
            for each in own
            for path in self._manifests(each)
        )
        is_staged = any(path.endswith(STAGED) for path in found)
        return "files" if was_filled and not is_staged else ""

    def recover(self) -> None:
        for path in self._manifests(self._own)[-1:]:
            self._apply(self._read_json(path), again=True)
        with self._compacting():
            pass  # entering it finishes a compaction that was killed

    def has_batch(self, batch_id: int) -> bool:
        newest = self._manifests(self._own)[-1:]
        return any(path >= self._batch_path(batch_id) for path in newest)

    def sweep(self) -> None:
        super().sweep()
        for path in self._manifests(self._own)[:-_KEPT_MANIFESTS]:
            self.files.delete_file(path)

    def _batch_path(self, batch_id: int) -> str:
        return f"{self._own}/batch-{batch_id:020d}.json"

    def commit(
        self, batch_id: int, files: Sequence[dict[str, Any]], offsets: str = ""
    ) -> None:
        moves = [
            [
                each["path"],
                self._final_path(each["path"], orjson.loads(each["partition"])),
            ]
            for each in files
        ]
        manifest = {
            "query": self._query,
            "offsets": offsets,
            "add": moves,
            "remove": [],
        }
        # First the manifest: it is the commit. If the driver dies before the last move,
        # `recover` reads it and moves the rest.
        self._write_json(self._batch_path(batch_id), manifest)
        self._apply(manifest)

    def _apply(self, manifest: dict[str, Any], *, again: bool = False) -> None:
        """Carry out a committed manifest: delete and move the files that it lists.

        Args:
            again: whether a killed driver may have carried out a part of it.
        """
        # Remove the old files of a compaction before the merged file is in place: a
        # reader in between misses rows, which is better than to count them twice.
        for path in manifest["remove"]:
            if self.files.get_file_info(f"{self.root}/{path}").type == fs.FileType.File:
                self.files.delete_file(f"{self.root}/{path}")
        for staged, final in manifest["add"]:
            # A missing file was moved by the killed driver, and may have been merged
            # into another one since: it need not be in the table.
            if again and self.files.get_file_info(staged).type != fs.FileType.File:
                continue
            self._move(staged, final)

    @contextmanager
    def _compacting(self) -> Iterator[bool]:
        """Yield whether this process may merge and delete the table's files now.

        Two processes that merge the same files would double their rows. A lock on a
        file prevents that; the kernel releases it when its process ends. An object
        store has no locks: there only the table's pipeline compacts. A compaction that
        a killed process has left unfinished is finished first.
        """
        directory = f"{self.root}/{_OWN}/{_COMPACT}"
        with ExitStack() as stack:
            if isinstance(self.files, fs.LocalFileSystem):
                self.files.create_dir(directory, recursive=True)
                lock = stack.enter_context(open(f"{directory}/lock", "wb"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
            manifests = self._manifests(directory)
            for path in manifests[-1:]:
                self._apply(self._read_json(path), again=True)
            for path in manifests[:-_KEPT_MANIFESTS]:
                self.files.delete_file(path)
            staging = f"{directory}/staging"
            if self.files.get_file_info(staging).type == fs.FileType.Directory:
                self.files.delete_dir(staging)
            yield True

    def compact(self) -> tuple[int, int]:
        with self._compacting() as alone:
            if not alone:
                count = len(self.data_files())
                return count, count
            return self._compact()

    def _compact(self) -> tuple[int, int]:
        target = int(self.table.compact_mb * 1024 * 1024)
        sizes = {
            path: self.files.get_file_info(path).size for path in self.data_files()
        }
        before, after = len(sizes), len(sizes)
        directories: dict[str, list[str]] = {}
        for path in sorted(sizes):
            if sizes[path] < target // 2:
                directories.setdefault(path.rpartition("/")[0], []).append(path)
        for directory, paths in directories.items():
            group: list[str] = []
            for path in [*paths, ""]:
                full = sum(sizes[each] for each in group) >= target
                if group and (full or not path):
                    if len(group) > 1:
                        self._merge(directory, group)
                        after -= len(group) - 1
                    group = []
                group.append(path)
        return before, after

    def _merge(self, directory: str, paths: list[str]) -> None:
        own = f"{self.root}/{_OWN}/{_COMPACT}"
        staged = f"{own}/staging/{uuid.uuid4().hex}{STAGED}"
        self.files.create_dir(staged.rpartition("/")[0], recursive=True)
        # Use all columns of the table, even if all these files lack one: the merged
        # file becomes the newest one, whose columns are taken for the table's.
        outside = {field.name for field in self.partition_fields}
        schema = pa.schema([each for each in self.schema if each.name not in outside])
        compression = self.table.compression
        with pq.ParquetWriter(
            staged, schema, filesystem=self.files, compression=compression
        ) as writer:
            for path in paths:
                with self.files.open_input_file(path) as file:
                    writer.write_table(_widened(pq.ParquetFile(file).read(), schema))
        inside = directory.removeprefix(self.root).strip("/")
        name = self._final_name(staged)
        manifest = {
            "query": self._query,
            "add": [[staged, "/".join(filter(None, [inside, name]))]],
            "remove": [path.removeprefix(f"{self.root}/") for path in paths],
        }
        # First the manifest: if this process dies while files are removed and moved,
        # `_compacting` in the next one reads it and does the rest.
        self._write_json(f"{own}/compact-{time.time_ns():020d}.json", manifest)
        self._apply(manifest)

    def _manifests(self, directory: str) -> list[str]:
        selector = fs.FileSelector(directory, allow_not_found=True)
        return sorted(
            info.path
            for info in self.files.get_file_info(selector)
            if info.path.endswith(".json") and not info.path.endswith("query.json")
        )

    def delete_files(self, is_old: Callable[[str], bool]) -> int:
        """Delete the data files whose paths ``is_old`` accepts; return their number.

        Returns:
            -1 if another process is compacting: then no file was deleted.
        """
        with self._compacting() as alone:
            if not alone:
                return -1
            paths = [path for path in self.data_files() if is_old(path)]
            if paths:
                mark_may_be_empty(self.table.path)
            for path in paths:
                self.files.delete_file(path)
            return len(paths)

    def data_files(self) -> list[str]:
        return parquet_files(self.files, self.root)


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with all columns of a schema; columns that they lack are null."""
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    # Arrow casts a struct to one with more fields.
    return rows.select(schema.names).cast(schema)


class DeltaTable(LakeTable):
    """A Delta table, written with delta-rs."""

    evolves = True

    def file_writer(self) -> PlacedFiles | None:
        if self.table.key:
            return None  # changes are staged
        # Readers see a file once the log names it.
        return PlacedFiles(self.table, f"{self.name}-")

    def check_schema(self) -> None:
        table = self._open()
        if table is not None:
            found = pa.schema(table.schema().to_arrow())
            self._refuse_schema(found)
            by = tuple(table.metadata().partition_columns)
            if by != self.table.partition_by:
                raise PipelineError(
                    f"{self.table.path} is partitioned by {', '.join(by) or 'nothing'},"
                    f" not by {', '.join(self.table.partition_by) or 'nothing'}"
                )

    def recover(self) -> None:
        """Do nothing: a commit is one file of Delta's log, which exists or does not."""

    def exists(self) -> bool:
        return self._open() is not None

    def _lost(self, own: Sequence[str]) -> str:
        named = self.data_files()
        if not named:
            # Tombstones may delete the last row of a table with a key.
            is_emptied = not self.table.key and any(map(_empties, self._history()))
            return "rows" if is_emptied else ""
        files, path = open_directory(named[0])
        if files.get_file_info(path).type == fs.FileType.File:
            return ""
        # delta-rs may spell the name of a directory differently.
        return "" if parquet_files(self.files, self.root) else "files"

    def _history(self) -> list[dict[str, Any]]:
        table = self._open()
        return [] if table is None else list(table.history())

    def evolve(self) -> None:
        from deltalake import write_deltalake

        table = self._open()
        if table is None:
            return  # it will be created with all columns
        there = pa.schema(table.schema().to_arrow())
        if set(there.names) == set(self.schema.names) and all(
            _same_type(field.type, there.field(field.name).type)
            for field in self.schema
        ):
            return
        nothing = self.schema.empty_table()
        write_deltalake(table, nothing, mode="append", schema_mode="merge")

    def has_batch(self, batch_id: int) -> bool:
        table = self._open()
        if table is None:
            return False
        last = table.transaction_version(self._application)
        return last is not None and last >= batch_id

    def commit(
        self, batch_id: int, files: Sequence[dict[str, Any]], offsets: str = ""
    ) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        table = self._open() or self._create()
        properties = CommitProperties(
            custom_metadata={"mpbroker.offsets": offsets},
            app_transactions=[Transaction(self._application, batch_id)],
        )
        if self.table.key:
            self._merge_changes(files, properties)
            return
        now_ms = int(time.time() * 1000)
        actions = []
        for each in files:
            path = each["path"].removeprefix(f"{self.root}/")
            values = orjson.loads(each["partition"])
            stats = orjson.dumps({"numRecords": each["rows"]}).decode()
            actions.append(AddAction(path, each["bytes"], values, now_ms, True, stats))
        table.create_write_transaction(
            actions,
            mode="append",
            schema=self.schema,
            partition_by=list(self.table.partition_by) or None,
            commit_properties=properties,
        )

    def _merge_changes(
        self, files: Sequence[dict[str, Any]], properties: CommitProperties
    ) -> None:
        """Replace and delete rows by key, in one commit.

        Raises:
            PipelineError: other writers were faster each time.
        """
        from deltalake.exceptions import CommitFailedError

        if not files:
            return
        changes = read_changes(self.files, files, self.table.key)
        same = " AND ".join(
            f'target."{name}" = source."{name}"' for name in self.table.key
        )
        for attempt in range(1, COMMIT_TRIES + 1):
            merger = self._open().merge(
                changes,
                same,
                source_alias="source",
                target_alias="target",
                commit_properties=properties,
            )
            try:
                merger.when_matched_delete(f"source.{DELETED}").when_matched_update_all(
                    except_cols=[DELETED]
                ).when_not_matched_insert_all(
                    f"NOT source.{DELETED}", except_cols=[DELETED]
                ).execute()
                break
            except CommitFailedError as error:
                if attempt == COMMIT_TRIES:
                    raise PipelineError(
                        f"{self.table.path}: other writers were faster each time"
                        f" ({error}): start the pipeline again"
                    ) from error
        for each in files:
            self.files.delete_file(each["path"])

    def compact(self) -> tuple[int, int]:
        table = self._open()
        if table is None:
            return 0, 0
        before = len(table.file_uris())
        table.optimize.compact(target_size=int(self.table.compact_mb * 1024 * 1024))
        # Delete files that the table has not named for a week; "full" includes those of
        # tasks that were not committed.
        table.vacuum(dry_run=False, full=True)
        return before, len(table.file_uris())

    def data_files(self) -> list[str]:
        table = self._open()
        return [] if table is None else list(table.file_uris())

    def uris(self) -> list[str]:
        return self.data_files()

    def values_by_file(self) -> dict[str, dict[str, Any]] | None:
        # Take the values from the log: delta-rs spells directories' names differently
        # from Spark.
        table = self._open()
        if table is None or not self.table.partition_by:
            return None
        found = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        return {
            each["path"].rpartition("/")[2]: {
                name: each[f"partition.{name}"] for name in self.table.partition_by
            }
            for each in found
        }

    @property
    def _application(self) -> str:
        return f"mpbroker-{self.name}-{self._query}"

    def _open(self) -> Any:
        return open_delta(self.table.path)

    def _create(self) -> Any:
        from deltalake import DeltaTable as Stored

        return Stored.create(
            self.table.path,
            self.schema,
            mode="ignore",
            partition_by=list(self.table.partition_by) or None,
            storage_options=storage_options(),
        )


def mark_may_be_empty(path: str) -> None:
    """Note in a table's directory that rows are deleted for their age, perhaps all.

    Args:
        path: the table's path or URI.
    """
    files, root = open_directory(path)
    files.create_dir(f"{root}/{_OWN}", recursive=True)
    with files.open_output_stream(f"{root}/{_OWN}/{_MAY_BE_EMPTY}"):
        pass


def parquet_files(files: fs.FileSystem, root: str) -> list[str]:
    """Return the paths of a Parquet directory's data files, sorted."""
    return sorted(info.path for info in _parquet_infos(files, root))


def newest_parquet_files(files: fs.FileSystem, root: str) -> list[str]:
    """Return the paths of a Parquet directory's data files, newest first."""
    infos = _parquet_infos(files, root)
    infos.sort(key=lambda info: (-(info.mtime_ns or 0), info.path))
    return [info.path for info in infos]


def _parquet_infos(files: fs.FileSystem, root: str) -> list[fs.FileInfo]:
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    return [
        info
        for info in files.get_file_info(selector)
        if info.type == fs.FileType.File
        and info.path.endswith(PARQUET)
        and _is_read(info.path.removeprefix(root))
    ]


def _is_read(path: str) -> bool:
    """Return whether Spark reads a file at this path.

    Spark ignores names that begin with "_", except directories such as "_name=x".
    """
    return not any(
        part.startswith("_") and "=" not in part for part in path.strip("/").split("/")
    )


def _empties(commit: dict[str, Any]) -> bool:
    """Return whether a commit of Delta's history deletes rows, and is not a batch.

    Args:
        commit: an entry of ``DeltaTable.history()``.
    """
    mode = str(commit.get("operationParameters", {}).get("mode", "")).lower()
    return (
        commit.get("operation") in ("DELETE", "TRUNCATE", "RESTORE")
        or mode == "overwrite"
    )


def open_delta(path: str) -> Any:
    """Open the Delta table at a path with delta-rs; None if there is none."""
    from deltalake import DeltaTable as Stored
    from deltalake.exceptions import TableNotFoundError

    try:
        return Stored(path, storage_options=storage_options())
    except TableNotFoundError:
        return None


def storage_options() -> dict[str, str]:
    """Return the options for delta-rs that it does not take from the environment.

    delta-rs connects to an endpoint without TLS only if an option allows it.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL", ""
    )
    return {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {}


def check_delta() -> None:
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        raise PipelineError(
            f"Delta tables need delta-rs ({error}): pip install"
            " 'mpbroker-server[spark]', or"
            ' set table.format = "parquet"'
        ) from None
