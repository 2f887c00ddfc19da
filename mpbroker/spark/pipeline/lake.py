"""Tables that take a batch once, however often it is brought, and whoever is killed.

A batch is known by (checkpoint's query id, batch id). Executors stage its files; one
file that the driver writes by rename is the commit:

    parquet   <table>/_mpbroker/<pipeline>/<batch>.json says which staged files belong
              where; they are moved then. Killed in between, the next start moves the
              rest. Readers see a batch's files come one by one.
    delta     the table's own log, with delta-rs; the batch id goes into the commit as
              an application transaction. Readers see all of a batch or nothing.

A batch that is committed already is dropped. Names that begin with "_" are not looked
at by readers of Parquet directories, Spark's among them, nor by Delta's vacuum.
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
_KEPT_MANIFESTS: Final = 20  # the newest counts; some more for whoever looks into it


class LakeTable(ABC):
    """One table, as one pipeline's driver writes it."""

    def __init__(self, table: Table, schema: pa.Schema, name: str) -> None:
        """Look at what is there; change nothing.

        Args:
            schema: of the rows, without columns that are computed for partitions.
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

    # -- whose it is -------------------------------------------------------------------

    def claim(self, query: str) -> None:
        """Bind the table to a checkpoint, and finish what a killed driver began.

        Raises:
            PipelineError: another checkpoint's batches are in it.
        """
        path = f"{self._own}/query.json"
        known = self._read_json(path)
        if known is not None and known["query"] != query:
            raise PipelineError(
                f"{self.table.path} was filled by pipeline {self.name!r} with another"
                f" checkpoint (query {known['query']}): going on with this one would"
                " double its rows. Put the checkpoint back, or choose another"
                " pipeline.name or table"
            )
        self._query = query
        if known is None:
            self._write_json(path, {"query": query})
        self.recover()
        self.sweep()

    def check_claim(self, query: str | None) -> None:
        """Say what `claim` would, and change nothing.

        Args:
            query: None if the checkpoint is new.
        """
        known = self._read_json(f"{self._own}/query.json")
        if known is not None and known["query"] != query:
            raise PipelineError(
                f"{self.table.path} holds rows of pipeline {self.name!r} and another"
                " checkpoint: starting anew would double them. Put the checkpoint"
                " back, or choose another pipeline.name or table"
            )

    def staging(self, batch_id: int) -> str:
        """Return where a batch's tasks put their files, as path or URI."""
        return f"{self.table.path}/{_OWN}/{self.name}/staging/{batch_id}"

    def sweep(self) -> None:
        """Remove what was staged and never committed."""
        path = f"{self._own}/staging"
        if self.files.get_file_info(path).type == fs.FileType.Directory:
            self.files.delete_dir(path)

    # -- what each kind does in its own way --------------------------------------------

    @abstractmethod
    def check_schema(self) -> None:
        """Raise PipelineError if the table that is there has other columns."""

    @abstractmethod
    def recover(self) -> None:
        """Finish a commit that a killed driver began."""

    @abstractmethod
    def has_batch(self, batch_id: int) -> bool:
        """Return whether a batch is committed."""

    @abstractmethod
    def commit(self, batch_id: int, files: Sequence[dict[str, Any]]) -> None:
        """Make staged files part of the table, all of them and once."""

    @abstractmethod
    def compact(self) -> tuple[int, int]:
        """Merge small files; return how many there were and are now."""

    @abstractmethod
    def data_files(self) -> list[str]:
        """Return the paths of the files that count."""

    def uris(self) -> list[str]:
        """Return the files that count as Spark is to be told of them."""
        return [
            self.table.path + each.removeprefix(self.root) for each in self.data_files()
        ]

    def values_by_file(self) -> dict[str, dict[str, Any]] | None:
        """Return each file's partition values; None if its directories say them all."""
        return None

    # -- files -------------------------------------------------------------------------

    def _final_path(self, staged: str, values: dict[str, str | None]) -> str:
        name = staged.rpartition("/")[2]
        return "/".join(filter(None, [hive_directory(values), f"{self.name}-{name}"]))

    def _move(self, staged: str, final: str) -> None:
        """Move a staged file to its place, unless that was done."""
        target = f"{self.root}/{final}"
        if self.files.get_file_info(staged).type == fs.FileType.NotFound:
            if self.files.get_file_info(target).type == fs.FileType.NotFound:
                raise PipelineError(f"{staged} is gone before it was committed")
            return
        self.files.create_dir(target.rpartition("/")[0], recursive=True)
        self.files.move(staged, target)

    def _read_json(self, path: str) -> Any:
        if self.files.get_file_info(path).type != fs.FileType.File:
            return None
        with self.files.open_input_stream(path) as stream:
            return orjson.loads(stream.read())

    def _write_json(self, path: str, content: Any) -> None:
        """Write a file that is there whole, or not at all."""
        self.files.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with self.files.open_output_stream(temporary) as stream:
            stream.write(orjson.dumps(content))
        self.files.move(temporary, path)

    def _refuse_schema(self, found: pa.Schema) -> None:
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
    # Delta hands back large and view types, which hold the same.
    def plain(kind: pa.DataType | None) -> str:
        return (
            str(kind)
            .replace("large_", "")
            .replace("_view", "")
            .replace("element", "item")
        )

    return plain(one) == plain(other)


class ParquetTable(LakeTable):
    """A directory of Parquet files, with what was committed beside them."""

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
                    f"{self.table.path} is partitioned otherwise: {found[0]}"
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
        """Do what a manifest says, or what a killed driver left of it."""
        # Compaction's old files first: a reader in between misses rows for a moment,
        # rather than count them twice.
        for path in manifest["remove"]:
            if self.files.get_file_info(f"{self.root}/{path}").type == fs.FileType.File:
                self.files.delete_file(f"{self.root}/{path}")
        for staged, final in manifest["add"]:
            # Not there any more: moved by who was killed, and compacted since, maybe.
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
    """A Delta table, through delta-rs."""

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
        """A commit is one file of Delta's log: there or not."""

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
            # Moved before the commit: until then nobody's log names it.
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
        table.vacuum(dry_run=False)  # what nobody has needed for a week
        return before, len(table.file_uris())

    def data_files(self) -> list[str]:
        table = self._open()
        return [] if table is None else list(table.file_uris())

    def uris(self) -> list[str]:
        return self.data_files()

    def values_by_file(self) -> dict[str, dict[str, Any]] | None:
        # Directories say them too, which delta-rs spells otherwise than Spark.
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
    """Return a table as it lies there, and whether its rows have headers.

    For who reads it: what it is partitioned by need not be said again.

    Raises:
        PipelineError: it cannot be read.
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
    """Return the files that a directory of Parquet consists of."""
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    return sorted(
        info.path
        for info in files.get_file_info(selector)
        if info.type == fs.FileType.File
        and info.path.endswith(_SUFFIX)
        and _is_read(info.path.removeprefix(root))
    )


def _is_read(path: str) -> bool:
    """Return whether readers look at a file: not below "_name", but below "_name=x"."""
    return not any(
        part.startswith("_") and "=" not in part for part in path.strip("/").split("/")
    )


def _open_delta(path: str) -> Any:
    """Return delta-rs' table, None if there is none."""
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
            ' say table.format = "parquet"'
        ) from None


def open_table(table: Table, schema: pa.Schema, name: str) -> LakeTable:
    """Return a table of the description's format.

    Raises:
        PipelineError: see `LakeTable`; or delta-rs is not here.
    """
    if table.format == "parquet":
        return ParquetTable(table, schema, name)
    _check_delta()
    return DeltaTable(table, schema, name)
