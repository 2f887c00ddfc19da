"""Commit batches to an Iceberg table, through PyIceberg and without a jar.

Executors write a batch's files to the table's data directory; nothing refers to them
yet. The driver then commits all of them as one snapshot, whose summary names the batch:

    mpbroker.application    the pipeline and its checkpoint's query
    mpbroker.batch          the batch id
    mpbroker.offsets        the source's offsets at the batch's end, as JSON

A batch that is in the table's history is not committed again. The same commit sets the
batch id as a property of the table, too: other tools may expire the snapshot.

Files of a try that was not committed are deleted by ``mpbroker pipeline maintain``.
"""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyarrow import fs

from mpbroker.spark.file_systems import find
from mpbroker.spark.pipeline.description import Table
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.schemas.partition_transform import (
    PartitionTransform,
    parse_partition,
)
from mpbroker.spark.pipeline.tables.changes import kept_rows, read_changes, without_keys
from mpbroker.spark.pipeline.tables.lake import COMMIT_TRIES, LakeTable

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table as Stored
    from pyiceberg.table import Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

APPLICATION: Final = "mpbroker.application"
BATCH: Final = "mpbroker.batch"
_OFFSETS: Final = "mpbroker.offsets"
# As catalogs write it: 00012-UUID; as Hadoop's: v12.
_METADATA_FILE: Final = re.compile(r"v?(\d+)(?:-.*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
# Iceberg's names of codecs, where they differ from the description's.
_CODECS: Final = {"none": "uncompressed"}
# PyIceberg's properties of S3, and the usual environment variables behind each.
# "client.region" counts for PyIceberg if there is no "s3.region", and so do the others.
_S3: Final = {
    "s3.endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "s3.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "s3.access-key-id": ("AWS_ACCESS_KEY_ID",),
    "s3.secret-access-key": ("AWS_SECRET_ACCESS_KEY",),
    "s3.session-token": ("AWS_SESSION_TOKEN",),
}
# These come from one place: a store refuses a key with another key's secret or token.
_CREDENTIALS: Final = {
    "s3.access-key-id",
    "s3.secret-access-key",
    "s3.session-token",
    "s3.profile-name",
    "s3.anonymous",
}


@dataclass(frozen=True)
class IcebergFiles:
    """Writes rows to an Iceberg table's data files; Spark pickles it to executors.

    Attributes:
        metadata: the table's metadata as JSON, without its snapshots.
        properties: the catalog's properties, which say how to reach the files.
    """

    metadata: str
    properties: Mapping[str, str]

    def __call__(self, rows: pa.Table) -> list[dict[str, Any]]:
        """Write rows to data files; return the path, rows and bytes of each."""
        from pyiceberg.io import load_file_io
        from pyiceberg.io.pyarrow import _dataframe_to_data_files
        from pyiceberg.table.metadata import TableMetadataUtil

        metadata = TableMetadataUtil.parse_raw(self.metadata)
        io = load_file_io(dict(self.properties), metadata.location)
        return [
            {
                "path": entry.file_path,
                "partition": base64.b64encode(pickle.dumps(entry)).decode(),
                "rows": entry.record_count,
                "bytes": entry.file_size_in_bytes,
            }
            for entry in _dataframe_to_data_files(metadata, rows, io)
        ]


class IcebergTable(LakeTable):
    """A table of an Iceberg catalog, to which a pipeline commits batches."""

    def __init__(self, table: Table, schema: pa.Schema, name: str) -> None:
        self._catalog = load_iceberg_catalog(table)
        self._partitions = [
            self._partition(text, table, schema) for text in table.partition_by
        ]
        # Iceberg computes the partitions; no column is added to the rows.
        super().__init__(replace(table, partition_by=()), schema, name)

    @staticmethod
    def _partition(text: str, table: Table, schema: pa.Schema) -> PartitionTransform:
        if text == "date" and text not in schema.names:
            text = f"day({table.event_time or '_timestamp'})"
        found = parse_partition(text)
        assert found is not None  # the description was checked
        return found

    # -- what the table is like --------------------------------------------------------

    def check_schema(self) -> None:
        stored = self._open()
        if stored is None:
            return
        self._check_location(stored)
        with self._explained():
            self._evolve(stored.transaction())  # and commit nothing

    def _check_location(self, stored: Stored) -> None:
        there = stored.metadata.location
        _, inside = find(there)
        if inside != self.root:
            raise PipelineError(
                f"Iceberg's table {self.table.identifier} is at {there}, not at"
                f" {self.table.path}: set table.path to its place, or choose another"
                " table.identifier"
            )

    def _evolve(self, change: Transaction) -> bool:
        """Give the table the pipeline's columns and partitions; return if it changed.

        Columns that only the table has stay; its other partition fields are removed.

        Raises:
            ValidationError: a column has another type, which its values do not fit.
        """
        before = change.table_metadata
        with change.update_schema() as columns:
            columns.union_by_name(self.schema)
        wanted = {each.name: each for each in self._partitions}
        schema = change.table_metadata.schema()
        there = {
            field.name: (
                schema.find_column_name(field.source_id),
                str(field.transform),
            )
            for field in before.spec().fields
        }
        with change.update_spec() as spec:
            for name, found in there.items():
                if name not in wanted or wanted[name][:2] != found:
                    spec.remove_field(name)
            for name, each in wanted.items():
                if there.get(name) != each[:2]:
                    spec.add_field(each.column, each.transform, name)
        after = change.table_metadata
        return (before.schema(), before.spec()) != (after.schema(), after.spec())

    def exists(self) -> bool:
        return self._open() is not None

    def _lost(self, own: Sequence[str]) -> str:
        stored = self._open()
        snapshot = stored.current_snapshot() if stored is not None else None
        if stored is None or snapshot is None:
            return ""
        from pyiceberg.manifest import ManifestContent

        missing = False
        with self._explained():
            for manifest in snapshot.manifests(stored.io):
                if manifest.content != ManifestContent.DATA:
                    continue
                for entry in manifest.fetch_manifest_entry(
                    stored.io, discard_deleted=True
                ):
                    if stored.io.new_input(entry.data_file.file_path).exists():
                        return ""
                    missing = True
        if missing:
            return "files"
        # Tombstones may delete the last row of a table with a key.
        had_rows = any(
            int(each.summary["added-records"] or 0)
            for each in stored.snapshots()
            if each.summary is not None
        )
        return "rows" if had_rows and not self.table.key else ""

    def make_room(self) -> None:
        """Create the table's namespace in the catalog, unless the table exists already.

        SeaweedFS's catalog refuses to create a namespace that contains a file already,
        and the file that claims a table lies below its namespace.
        """
        if self._open() is None:
            with self._explained():
                self._create_namespace()

    def _create_namespace(self) -> None:
        namespace = self.table.identifier.rpartition(".")[0]
        self._catalog.create_namespace_if_not_exists(namespace)

    def recover(self) -> None:
        """Create the table, or add new columns and partitions to it."""
        stored = self._open()
        with self._explained():
            if stored is None:
                self._create()
                return
            change = stored.transaction()
            if self._evolve(change):
                change.commit_transaction()

    def _create(self) -> None:
        from pyiceberg.exceptions import TableAlreadyExistsError

        self._create_namespace()
        codec = self.table.compression
        path = self.table.path
        change = self._catalog.create_table_transaction(
            self.table.identifier,
            self.schema,
            location=path if "://" in path else f"file://{self.root}",
            properties={
                "write.parquet.compression-codec": _CODECS.get(codec, codec),
                # Each batch is a version of the table's metadata file.
                "write.metadata.delete-after-commit.enabled": "true",
            },
        )
        self._evolve(change)
        try:
            change.commit_transaction()
        except TableAlreadyExistsError:
            pass  # another pipeline that shares the table was faster

    # -- batches -----------------------------------------------------------------------

    def file_writer(self) -> IcebergFiles | None:
        if self.table.key:
            return None  # changes are staged
        metadata = self._existing().metadata.model_copy(
            update={
                "snapshots": [],
                "refs": {},
                "current_snapshot_id": None,
                "snapshot_log": [],
                "metadata_log": [],
            }
        )
        return IcebergFiles(metadata.model_dump_json(), self._catalog.properties)

    def has_batch(self, batch_id: int) -> bool:
        stored = self._open()
        if stored is None:
            return False
        return newest_batch(stored.metadata, self._application) >= batch_id

    def commit(
        self, batch_id: int, files: Sequence[dict[str, Any]], offsets: str = ""
    ) -> None:
        if not files:
            return  # no harm if the batch runs again: it has no rows
        summary = {
            APPLICATION: self._application,
            BATCH: str(batch_id),
            _OFFSETS: offsets,
        }
        if self.table.key:
            self._commit_changes(files, summary)
            return
        entries = [pickle.loads(base64.b64decode(each["partition"])) for each in files]
        # PyIceberg repeats the commit if another writer was faster.
        with self._explained(), self._existing().transaction() as change:
            change.set_properties({f"{BATCH}.{self._application}": summary[BATCH]})
            snapshot = change.update_snapshot(snapshot_properties=summary)
            with snapshot.merge_append() as append:
                for entry in entries:
                    append.append_data_file(entry)

    def _commit_changes(
        self, files: Sequence[dict[str, Any]], summary: dict[str, str]
    ) -> None:
        """Replace and delete rows by key, in one snapshot."""
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        changes = read_changes(self.files, files, self.table.key)
        with self._explained():
            for attempt in range(1, COMMIT_TRIES + 1):
                try:
                    self._merge_changes(self._existing(), changes, summary)
                    break
                except (CommitFailedException, ValidationException):
                    # Another writer has replaced a file that has such keys.
                    if attempt == COMMIT_TRIES:
                        raise
        for each in files:
            self.files.delete_file(each["path"])

    def _merge_changes(
        self, stored: Stored, changes: pa.Table, summary: dict[str, str]
    ) -> None:
        """Rewrite the files that have rows with changed keys, add the new rows, commit.

        All this is one snapshot of the table.
        """
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files

        metadata, io = stored.metadata, stored.io
        keys = changes.select(list(self.table.key))
        scan = ArrowScan(metadata, io, stored.schema(), AlwaysTrue())
        replaced: list[DataFile] = []
        rows = [kept_rows(changes)]
        for task in stored.scan(row_filter=self._between(keys)).plan_files():
            rest = without_keys(scan.to_table([task]), keys)
            if rest is not None:
                replaced.append(task.file)
                rows.append(rest)
        added = [
            file
            for each in rows
            if each.num_rows
            for file in _dataframe_to_data_files(metadata, each, io)
        ]
        with stored.transaction() as change:
            change.set_properties({f"{BATCH}.{self._application}": summary[BATCH]})
            with change.update_snapshot(summary).overwrite() as snapshot:
                for file in replaced:
                    snapshot.delete_data_file(file)
                for file in added:
                    snapshot.append_data_file(file)

    def _between(self, keys: pa.Table) -> Any:
        """Return a filter for files that may have rows with one of the keys.

        It compares each key column with the lowest and the highest value in the keys.
        """
        import pyiceberg.expressions as by

        parts: list[Any] = [by.AlwaysTrue()]
        for name in self.table.key:
            if keys.num_rows and not pa.types.is_boolean(keys.schema.field(name).type):
                limits = pc.min_max(keys.column(name)).as_py()
                parts.append(_at_least(by, name, limits["min"]))
                parts.append(_at_most(by, name, limits["max"]))
        return by.And(*parts) if len(parts) > 1 else parts[0]

    def compact(self) -> tuple[int, int]:
        """Do nothing: ``mpbroker pipeline maintain`` merges files."""
        return 0, 0

    def data_files(self) -> list[str]:
        stored = self._open()
        if stored is None:
            return []
        tasks = list(stored.scan().plan_files())
        if any(each.delete_files for each in tasks):
            raise PipelineError(
                f"Iceberg's table {self.table.identifier} has delete files of another"
                " tool, which Spark would not see here: have that tool rewrite them"
            )
        return [each.file.file_path for each in tasks]

    def uris(self) -> list[str]:
        return self.data_files()

    # -- PyIceberg ---------------------------------------------------------------------

    @property
    def _application(self) -> str:
        return f"mpbroker-{self.name}-{self._query}"

    def _open(self) -> Stored | None:
        """Return the table as it is now; None if the catalog does not have it."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with self._explained():
            try:
                return self._catalog.load_table(self.table.identifier)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def _existing(self) -> Stored:
        stored = self._open()
        if stored is None:
            raise PipelineError(
                f"Iceberg's table {self.table.identifier} was dropped while the"
                " pipeline ran: restore it, or start again with a new checkpoint"
            )
        return stored

    def _explained(self) -> Any:
        return explained(self.table)


def _at_least(by: Any, name: str, value: Any) -> Any:
    return by.GreaterThanOrEqual(name, _literal(value))


def _at_most(by: Any, name: str, value: Any) -> Any:
    return by.LessThanOrEqual(name, _literal(value))


def _literal(value: Any) -> Any:
    is_date = isinstance(value, datetime.date)
    return value.isoformat() if is_date else value


def open_in_catalog(table: Table) -> Stored | None:
    """Open a table through its catalog; None if it does not exist.

    Raises:
        PipelineError: the catalog cannot be used.
    """
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with explained(table):
        try:
            return load_iceberg_catalog(table).load_table(table.identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None


def iceberg_columns(table: Table) -> list[str]:
    """Return the names of a table's columns; none if it does not exist.

    Raises:
        PipelineError: the catalog cannot be used.
    """
    found = open_in_catalog(table)
    return [field.name for field in found.schema().fields] if found else []


def ancestors(metadata: TableMetadata) -> Iterator[Snapshot]:
    """Yield the current snapshot and its ancestors, the newest first."""
    snapshot = metadata.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot_by_id(parent)


def newest_batch(metadata: TableMetadata, application: str) -> int:
    """Return the id of the newest batch in a table from an application; -1 if none.

    An application is a pipeline with its checkpoint's query.
    """
    for snapshot in ancestors(metadata):
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        if summary.get(APPLICATION) == application:
            return int(summary[BATCH])
    # Another tool has expired the snapshot.
    return int(metadata.properties.get(f"{BATCH}.{application}", -1))


def load_iceberg_catalog(table: Table) -> Catalog:
    """Return the Iceberg catalog of a table.

    A property is that of the pipeline's TOML file. If that lacks it, PyIceberg's own
    configuration counts (PYICEBERG_CATALOG__..., then .pyiceberg.yaml), and at last,
    for S3, the usual environment variables (AWS_...).

    Raises:
        PipelineError: PyIceberg is not installed, or the catalog cannot be used.
    """
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NotInstalledError
        from pyiceberg.utils.config import Config
    except ImportError as error:
        raise PipelineError(_needs(error)) from None
    given = {key: str(value) for key, value in table.catalog.items()}
    # A database closes connections that are idle from one batch to the next.
    given.setdefault("pool_pre_ping", "true")
    name = given.pop("name", "default")
    with explained(table):
        try:
            configured = Config().get_catalog_config(name) or {}
            known = _environment(given.keys() | configured.keys())
            return load_catalog(name, **(known | given))
        except (ModuleNotFoundError, NotInstalledError) as error:
            raise PipelineError(
                f"the catalog {given.get('uri', '').partition(':')[0]} needs its driver"
                f" ({error.__cause__ or error}): pip install 'psycopg[binary]' for"
                " postgresql+psycopg"
            ) from error
        except ValueError as error:
            if "uri" in given:
                raise
            raise PipelineError(
                "table.format='iceberg' needs a catalog: give [table.catalog] a uri,"
                ' as "sqlite:////lake/catalog.db", "postgresql+psycopg://..." or'
                f' "https://..." of a REST catalog ({error})'
            ) from None


def _environment(configured: Collection[str] = ()) -> dict[str, str]:
    """Return the properties of S3 that the environment variables ``AWS_...`` tell.

    Args:
        configured: the names of the properties that are set otherwise, which count
            instead. If a credential is among them, all are left out.
    """
    names = {re.sub("^client[.]", "s3.", name) for name in configured}
    if names & _CREDENTIALS:
        names |= _CREDENTIALS
    return {
        key: os.environ[name]
        for key, variables in _S3.items()
        for name in reversed(variables)
        if key not in names and os.environ.get(name)
    }


def open_by_path(path: str) -> Stored | None:
    """Open a table by its newest metadata file, without its catalog.

    None: there is no Iceberg table at the path. The newest file may be that of a commit
    that the catalog has refused, or has never received.

    Raises:
        PipelineError: several files are the newest, or PyIceberg is not installed.
    """
    files, root = find(path)
    found = files.get_file_info(
        fs.FileSelector(f"{root}/metadata", allow_not_found=True)
    )
    by_version: dict[int, list[str]] = {}
    for each in found:
        name = _METADATA_FILE.fullmatch(each.base_name)
        if name is not None:
            by_version.setdefault(int(name[1]), []).append(each.base_name)
    if not by_version:
        return None
    newest = by_version[max(by_version)]
    if len(newest) > 1:
        raise PipelineError(
            f"{path} has {len(newest)} newest metadata files, {', '.join(newest)}: only"
            " the catalog knows which one counts; name the table by its pipeline's file"
        )
    try:
        from pyiceberg.table import StaticTable
    except ImportError as error:
        raise PipelineError(_needs(error)) from None
    place = path if "://" in path else f"file://{root}"
    return StaticTable.from_metadata(f"{place}/metadata/{newest[0]}", _environment())


def _needs(error: ImportError) -> str:
    return (
        f"Iceberg tables need PyIceberg ({error}):"
        " pip install 'mpbroker-server[iceberg]', or set table.format = \"delta\""
    )


@contextmanager
def explained(table: Table) -> Iterator[None]:
    """Turn errors of PyIceberg, its catalogs and stores into PipelineError."""
    from pyiceberg import exceptions as iceberg
    from requests import RequestException
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
    from sqlalchemy.exc import SQLAlchemyError as DatabaseError

    what = f"Iceberg's table {table.identifier}"
    try:
        yield
    except iceberg.CommitStateUnknownException as error:
        raise PipelineError(
            f"{what}: it is not known whether the catalog took a commit"
            f" ({_line(error)}): start the pipeline again, which looks first"
        ) from error
    except iceberg.CommitFailedException as error:
        raise PipelineError(
            f"{what}: other writers were faster each time ({_line(error)}): start the"
            " pipeline again, which goes on where it was"
        ) from error
    except (iceberg.ValidationError, iceberg.ValidationException, ValueError) as error:
        raise PipelineError(
            f"{what} does not fit the pipeline: {_line(error)}. Write to another"
            " table with a new checkpoint, or change the description"
        ) from error
    except (iceberg.RESTError, DBAPIError, iceberg.NoSuchTableError) as error:
        if isinstance(error, (InterfaceError, OperationalError)):
            raise _unreachable(what, error) from error
        raise PipelineError(
            f"{what}: the catalog refused: {_line(error)}. Check [table.catalog] and"
            " its credentials, and start the pipeline again; nothing is lost"
        ) from error
    except (RequestException, DatabaseError, OSError) as error:
        raise _unreachable(what, error) from error


def _unreachable(what: str, error: BaseException) -> PipelineError:
    return PipelineError(
        f"{what}: the catalog or the store cannot be reached: {_line(error)}. Check"
        " [table.catalog], its credentials and the network; nothing is lost"
    )


def _line(error: BaseException) -> str:
    """Return an error's first line; for SQLAlchemy that of the database's own error."""
    own = getattr(error, "orig", None) or error
    lines = [line.strip() for line in str(own).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
