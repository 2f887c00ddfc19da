"""Commit batches to tables, each batch once, even if processes are killed.

A batch is identified by the id of the checkpoint's query and the batch id. Executors
write its files to a staging area (`staging`). The driver then commits them by creating
one file with a rename:

    parquet   <table>/_mpbroker/<pipeline>/batch-<id>.json, a manifest: it lists staged
              files and their places in the table. The driver moves the files after the
              commit; if it is killed, the next start moves the rest. Readers see the
              files of a batch appear one by one.
    delta     an entry of the table's own log, with delta-rs. The batch id is stored in
              the entry as an application transaction. Readers see a batch as a whole.

A batch that is already committed is ignored. Readers of Parquet directories, such as
Spark, and Delta's vacuum ignore names that begin with "_".
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from pyarrow import fs

from mpbroker.spark.pipeline.description import Table
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import (
    hive_directory,
    open_directory,
    partition_columns,
    table_schema,
)

_OWN: Final = "_mpbroker"
_SUFFIX: Final = ".parquet"
_KEPT_MANIFESTS: Final = 20  # only the newest is used; the others help to find faults


class LakeTable(ABC):
    """A table that one pipeline's driver writes to."""

    def __init__(self, table: Table, schema: pa.Schema, name: str) -> None:
        """Open the table and check its columns; change nothing.

        Args:
            schema: the rows' columns, without the computed partition column "date".
            name: the pipeline's.

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
        """Bind the table to a checkpoint, and finish a killed driver's commit.

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
            self._write_json(path, {"query": query})
        self.recover()
        self.sweep()

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

    def staging(self, batch_id: int) -> str:
        """Return the directory for the files of a batch's tasks, as a path or URI."""
        return f"{self.table.path}/{_OWN}/{self.name}/staging/{batch_id}"

    def sweep(self) -> None:
        """Remove staged files that were never committed."""
        path = f"{self._own}/staging"
        if self.files.get_file_info(path).type == fs.FileType.Directory:
            self.files.delete_dir(path)

    # -- different for each format -----------------------------------------------------

    @abstractmethod
    def check_schema(self) -> None:
        """Raise PipelineError if the table exists and has other columns."""

    @abstractmethod
    def recover(self) -> None:
        """Finish a commit that a killed driver began."""

    @abstractmethod
    def has_batch(self, batch_id: int) -> bool:
        """Return whether a batch is committed."""

    @abstractmethod
    def commit(self, batch_id: int, files: Sequence[dict[str, Any]]) -> None:
        """Make all staged files of a batch part of the table.

        Args:
            files: what the tasks have reported, with the columns of FILES_DDL.
        """

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
        """Return each file's partition values; None if the directories give them."""
        return None

    # -- files -------------------------------------------------------------------------

    def _final_path(self, staged: str, values: dict[str, str | None]) -> str:
        name = staged.rpartition("/")[2]
        return "/".join(filter(None, [hive_directory(values), f"{self.name}-{name}"]))

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
        """Create a file by rename: readers find it complete, or do not find it."""
        self.files.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with self.files.open_output_stream(temporary) as stream:
            stream.write(orjson.dumps(content))
        self.files.move(temporary, path)

    def _refuse_schema(self, found: pa.Schema) -> None:
        """Raise PipelineError if a column differs in name or type."""
        wanted = {field.name: field.type for field in self.schema}
        there = {field.name: field.type for field in found}
        for name in wanted.keys() | there.keys():
            if not _same_type(wanted.get(name), there.get(name)):
                raise PipelineError(
                    f"{self.table.path}: column {name!r} is"
                    f" {there.get(name, 'not there')} in the table and"
                    f" {wanted.get(name, 'not there')} in the pipeline. Write to"
                    " another table, or change the description"
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


class ParquetTable(LakeTable):
    """A directory of Parquet files, with the manifests of commits beside them."""

    def check_schema(self) -> None:
        found = self.data_files()
        if found:
            inside = pq.read_schema(found[0], filesystem=self.files)
            names = {field.name for field in self.partition_fields}
            for field in self.partition_fields:
                if f"/{field.name}=" not in found[0]:
                    raise PipelineError(
                        f"{self.table.path} is not partitioned by {field.name}; write"
                        " to another table, or change table.partition_by"
                    )
                inside = (
                    inside.append(field) if field.name not in inside.names else inside
                )
            if len(names) != found[0].removeprefix(self.root).count("="):
                raise PipelineError(
                    f"{self.table.path} is partitioned by other columns: {found[0]}"
                )
            self._refuse_schema(inside)

    def recover(self) -> None:
        manifests = self._manifests()
        for kind in ("batch", "compact"):
            newest = [path for path in manifests if f"/{kind}-" in path][-1:]
            for path in newest:
                self._apply(self._read_json(path), again=True)

    def has_batch(self, batch_id: int) -> bool:
        newest = [path for path in self._manifests() if "/batch-" in path][-1:]
        return any(path >= self._batch_path(batch_id) for path in newest)

    def sweep(self) -> None:
        super().sweep()
        for kind in ("batch", "compact"):
            paths = [path for path in self._manifests() if f"/{kind}-" in path]
            for path in paths[:-_KEPT_MANIFESTS]:
                self.files.delete_file(path)

    def _batch_path(self, batch_id: int) -> str:
        return f"{self._own}/batch-{batch_id:020d}.json"

    def commit(self, batch_id: int, files: Sequence[dict[str, Any]]) -> None:
        moves = [
            [
                each["path"],
                self._final_path(each["path"], orjson.loads(each["partition"])),
            ]
            for each in files
        ]
        manifest = {"query": self._query, "add": moves, "remove": []}
        self._write_json(self._batch_path(batch_id), manifest)
        self._apply(manifest)

    def _apply(self, manifest: dict[str, Any], *, again: bool = False) -> None:
        """Carry out a manifest: remove and move its files.

        Args:
            again: a killed driver may have carried out a part of it.
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

    def compact(self) -> tuple[int, int]:
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
        staged = f"{self._own}/staging/compact/{uuid.uuid4().hex}{_SUFFIX}"
        self.files.create_dir(staged.rpartition("/")[0], recursive=True)
        schema = pq.read_schema(paths[0], filesystem=self.files)
        compression = self.table.compression
        with pq.ParquetWriter(
            staged, schema, filesystem=self.files, compression=compression
        ) as writer:
            for path in paths:
                with self.files.open_input_file(path) as file:
                    writer.write_table(pq.ParquetFile(file).read().cast(schema))
        inside = directory.removeprefix(self.root).strip("/")
        name = f"{self.name}-{staged.rpartition('/')[2]}"
        manifest = {
            "query": self._query,
            "add": [[staged, "/".join(filter(None, [inside, name]))]],
            "remove": [path.removeprefix(f"{self.root}/") for path in paths],
        }
        self._write_json(f"{self._own}/compact-{time.time_ns():020d}.json", manifest)
        self._apply(manifest)

    def _manifests(self) -> list[str]:
        selector = fs.FileSelector(self._own, allow_not_found=True)
        return sorted(
            info.path
            for info in self.files.get_file_info(selector)
            if info.path.endswith(".json") and not info.path.endswith("query.json")
        )

    def data_files(self) -> list[str]:
        return parquet_files(self.files, self.root)


class DeltaTable(LakeTable):
    """A Delta table, written with delta-rs."""

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

    def has_batch(self, batch_id: int) -> bool:
        table = self._open()
        if table is None:
            return False
        last = table.transaction_version(self._application)
        return last is not None and last >= batch_id

    def commit(self, batch_id: int, files: Sequence[dict[str, Any]]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        table = self._open() or self._create()
        now_ms = int(time.time() * 1000)
        actions = []
        for each in files:
            values = orjson.loads(each["partition"])
            final = self._final_path(each["path"], values)
            # Move the file before the commit: readers see it once the log names it.
            self._move(each["path"], final)
            stats = orjson.dumps({"numRecords": each["rows"]}).decode()
            actions.append(AddAction(final, each["bytes"], values, now_ms, True, stats))
        table.create_write_transaction(
            actions,
            mode="append",
            schema=self.schema,
            partition_by=list(self.table.partition_by) or None,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(self._application, batch_id)]
            ),
        )

    def compact(self) -> tuple[int, int]:
        table = self._open()
        if table is None:
            return 0, 0
        before = len(table.file_uris())
        table.optimize.compact(target_size=int(self.table.compact_mb * 1024 * 1024))
        # Delete files that the table has not named for a week.
        table.vacuum(dry_run=False)
        return before, len(table.file_uris())

    def data_files(self) -> list[str]:
        table = self._open()
        return [] if table is None else list(table.file_uris())

    def uris(self) -> list[str]:
        return self.data_files()

    def values_by_file(self) -> dict[str, dict[str, Any]] | None:
        # From the log: delta-rs spells the directories' names otherwise than Spark.
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
        return _open_delta(self.table.path)

    def _create(self) -> Any:
        from deltalake import DeltaTable as Stored

        return Stored.create(
            self.table.path,
            self.schema,
            mode="ignore",
            partition_by=list(self.table.partition_by) or None,
        )


def as_stored(table: Table) -> tuple[Table, bool]:
    """Return a table with the partitioning that is stored, for a job that reads it.

    Returns:
        The table, and whether its rows have headers. An empty table is unchanged.

    Raises:
        PipelineError: the table cannot be read.
    """
    if table.format == "delta":
        _check_delta()
        stored = _open_delta(table.path)
        if stored is None:
            return table, False
        by = tuple(stored.metadata().partition_columns)
        names = pa.schema(stored.schema().to_arrow()).names
    else:
        files, root = open_directory(table.path)
        found = parquet_files(files, root)
        if not found:
            return table, False
        directories = found[0].removeprefix(root).strip("/").split("/")[:-1]
        by = tuple(unquote(each.partition("=")[0]) for each in directories)
        names = pq.read_schema(found[0], filesystem=files).names
    return replace(table, partition_by=by), "_headers" in names


def parquet_files(files: fs.FileSystem, root: str) -> list[str]:
    """Return the paths of a Parquet directory's data files, sorted."""
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    return sorted(
        info.path
        for info in files.get_file_info(selector)
        if info.type == fs.FileType.File
        and info.path.endswith(_SUFFIX)
        and _is_read(info.path.removeprefix(root))
    )


def _is_read(path: str) -> bool:
    """Return whether readers look at a file: below "_name=x", but not below "_name"."""
    return not any(
        part.startswith("_") and "=" not in part for part in path.strip("/").split("/")
    )


def _open_delta(path: str) -> Any:
    """Return delta-rs' table; None if there is none at the path."""
    from deltalake import DeltaTable as Stored
    from deltalake.exceptions import TableNotFoundError

    try:
        return Stored(path)
    except TableNotFoundError:
        return None


def _check_delta() -> None:
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        raise PipelineError(
            f"Delta tables need delta-rs ({error}): pip install 'mpbroker[spark]', or"
            ' set table.format = "parquet"'
        ) from None


def open_table(table: Table, schema: pa.Schema, name: str) -> LakeTable:
    """Open a table in the format that the description gives.

    Args:
        schema: the rows' columns, without computed ones.
        name: the pipeline's.

    Raises:
        PipelineError: see `LakeTable`; or delta-rs is not installed.
    """
    if table.format == "parquet":
        return ParquetTable(table, schema, name)
    _check_delta()
    return DeltaTable(table, schema, name)
