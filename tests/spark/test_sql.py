"""`mpbroker sql`, and `sql` for notebooks: names become topics and tables."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from deltalake import write_deltalake

import mpbroker.spark
from mpbroker.cli import main
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.spark import sql as command
from mpbroker.spark.pipeline.tables import iceberg
from mpbroker.spark.sql_query import (
    QueryError,
    UnknownTableError,
    patiently,
    reason,
    sql,
)
from tests.spark import lakes
from tests.spark.cluster import QUICK_JAVA

pytestmark = pytest.mark.timeout(900)

FLIGHTS = [
    {"carrier": "AA", "dep_delay": 4, "plane": {"seats": 100}, "offset": "x"},
    {"carrier": "AA", "dep_delay": 6.5, "tags": ["late", "full"]},
    {"carrier": "UA", "dep_delay": None, "note": "é"},
]


@pytest.fixture
def put(bootstrap):
    def write(topic, values, **more):
        producer = Producer({"bootstrap.servers": bootstrap})
        for number, value in enumerate(values):
            producer.produce(topic, value, b"k%d" % number, **more)
        assert producer.flush(90) == 0

    return write


@pytest.fixture
def ask(spark, bootstrap):
    """Return the rows of a query as tuples, and prove that it leaves no view."""

    def run(query, **more):
        def once():
            before = {each.name for each in spark.catalog.listTables()}
            found = sql(query, bootstrap=bootstrap, spark=spark, **more)
            assert {each.name for each in spark.catalog.listTables()} <= before
            return [tuple(row) for row in found.collect()]

        return patiently(once)

    return run


def test_the_fields_of_json_values_are_columns(ask, put, make_topic):
    topic = make_topic(partitions=2)
    put(topic, map(orjson.dumps, FLIGHTS), headers=[("h", b"1")])
    put(topic, [None])  # a tombstone
    found = ask(
        f"select carrier, avg(dep_delay), max(plane.seats) from `{topic}`"
        " where carrier is not null group by 1 order by 1"
    )
    assert found == [("AA", 5.25, 100), ("UA", None, None)]
    # The record's own columns; one that has the name of a field begins with "_".
    (row,) = ask(
        "select offset, key, partition >= 0, _offset >= 0,"
        " timestamp > timestamp'2020-01-01', value, headers[0].value"
        f" from `{topic}` where offset = 'x'"
    )
    assert row[:5] == ("x", "k0", True, True, True)
    assert json.loads(row[5]) == FLIGHTS[0]
    assert bytes(row[6]) == b"1"
    # In a common table expression, a subquery, and twice.
    assert ask(
        f"with late as (select * from `{topic}` where dep_delay > 5)"
        f" select count(*), (select count(*) from `{topic}`) from late"
    ) == [(1, 4)]


def test_fields_have_the_types_that_a_pipeline_would_give_them(ask, put, make_topic):
    topic = make_topic()
    rows = [
        {
            "_id": 2**53 + number,
            "booked": f"{28 - number % 28}/7/2013",
            "departure": f"2013-07-19T1{number % 10}:00:00+02:00",
            "seen_ms": 1374213600000 + number,
            "legs": [{"at": f"2013-07-{number % 28 + 1:02}", "to": "IAH"}],
            "extra": '{"seats": 100}',
            "mixed": number if number % 2 else "text",
            "price": 1.25,
            "Price": 1,
        }
        for number in range(450)
    ]
    # Types are learnt from the values at the begin and the end.
    rows[225] = {"booked": "soon", "price": "?", "extra": "{", "legs": [{"at": 1}]}
    put(topic, map(orjson.dumps, rows))
    first, misfit = ask(
        "select _id, booked, departure, seen_ms, legs[0].at, extra.seats, mixed, price"
        f" from `{topic}` where offset in (0, 225) order by offset"
    )
    utc = datetime.UTC
    assert first == (
        2**53,
        datetime.date(2013, 7, 28),
        datetime.datetime(2013, 7, 19, 8, tzinfo=utc).replace(tzinfo=None),
        datetime.datetime(2013, 7, 19, 6, tzinfo=utc).replace(tzinfo=None),
        datetime.date(2013, 7, 1),
        100,
        "text",
        1.25,
    )
    assert misfit == (None,) * 8  # what does not fit is null
    assert ask(f"select count(*) from `{topic}` where price > 1") == [(449,)]


def test_iceberg_tables_are_read_by_path_and_by_their_catalog(ask, tmp_path):
    table = lakes.lake_table("iceberg", f"{tmp_path}/lake", f"{tmp_path}/catalog.db")
    lake = lakes.opened(table)
    lakes.bring(lake, 0)
    stored = iceberg.open_in_catalog(table)
    with stored.update_schema() as columns:
        columns.rename_column("n", "number")
    # Files of a batch that is not committed are in the same directory.
    lakes.stage(lakes.opened(table), 1, lakes.rows(10, 20))
    query = "select number, kind from `{}` order by 1"
    expected = [(n, f"a b/{n % 2}" if n % 3 else None) for n in range(10)]
    assert ask(query.format(table.path)) == expected
    description = tmp_path / "lake.toml"
    description.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/c"
        [source]
        bootstrap = "localhost:1"
        subscribe = "t"
        [table]
        path = "{table.path}"
        format = "iceberg"
        identifier = "default.lake"
        [table.catalog]
        uri = "{table.catalog["uri"]}"
        """
    )
    # A commit that was refused has left a metadata file, which the catalog ignores.
    (first,) = Path(table.path, "metadata").glob("00000-*.json")
    for number in range(2):
        shutil.copy(first, first.with_name(f"00009-{number}.metadata.json"))
    rows = ask(query.format("lake_table"), pipelines=[description])
    assert rows == expected
    with pytest.raises(QueryError, match=r"2 newest metadata files, .*by its pipeline"):
        ask(query.format(table.path))


def test_values_that_are_not_json_stay_whole(ask, put, make_topic):
    text, binary, empty = make_topic(), make_topic(), make_topic()
    put(text, [b"one", b'{"a": 1}', "zwölf".encode()])
    put(binary, [b"\xff\x00", b"\x01"])
    assert ask(f"select key, value from `{text}` where value like 'z%'") == [
        ("k2", "zwölf"),
    ]
    (row,) = ask(f"select hex(value) from `{binary}` where offset = 0")
    assert row == ("FF00",)
    assert ask(f"select count(*) from `{empty}`") == [(0,)]


def test_tables_are_found_by_path_by_name_and_in_descriptions(
    ask, put, bootstrap, make_topic, tmp_path
):
    topic = make_topic()
    put(topic, [b'{"n": 1}', b'{"n": 2}', b'{"n": "three"}'])
    dates = [datetime.date(2013, 1, day) for day in (1, 1, 2)]
    rows = pa.table({"n": [1, 2, 3], "day": dates, "place": ["a b", "c=d", None]})
    write_deltalake(str(tmp_path / "delta"), rows, partition_by=["day", "place"])
    write_deltalake(str(tmp_path / "plain"), rows)
    (tmp_path / "parquet").mkdir()
    pq.write_table(rows, tmp_path / "parquet" / "part-0.parquet")
    expected = [(1, dates[0], "a b"), (2, dates[1], "c=d"), (3, dates[2], None)]
    for name in ("delta", "plain", "parquet"):
        assert ask(f"select n, day, place from `{tmp_path}/{name}` order by n") == (
            expected
        )
    description = tmp_path / "numbers.toml"
    description.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/c"
        [source]
        bootstrap = "{bootstrap}"
        subscribe = "{topic}"
        maxOffsetsPerTrigger = 1
        [value]
        format = "json"
        fields = {{n = "int"}}
        [table]
        path = "{tmp_path}/delta"
        format = "delta"
        [dead_letter]
        path = "{tmp_path}/bad"
        """
    )
    # The topic as described: what does not fit is a dead letter, and no row.
    assert ask(
        f"select t.n, _offset, o.place from `{topic}` t join numbers_table using (n)"
        " join other o using (n) order by 1",
        tables={"other": str(tmp_path / "parquet")},
        pipelines=[description],
    ) == [(1, 0, "a b"), (2, 1, "c=d")]
    with pytest.raises(UnknownTableError, match=r"no table at .*/bad .*Parquet"):
        ask("select * from numbers_dead_letters", pipelines=[description])


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        ("selec 1", QueryError, r"^Syntax error at or near 'selec' \(line 1, pos 0\)$"),
        ("select x from (select 1 y)", QueryError, r"`x` cannot .*`y`\] \(line 1 pos"),
        ("select * from nowher", UnknownTableError, r"nowher is no topic.*--table"),
        ("select * from a.b", UnknownTableError, r"put backticks .*: `a\.b`$"),
    ],
)
def test_wrong_sql_is_one_sentence(ask, query, error, message):
    with pytest.raises(error, match=message) as caught:
        ask(query)
    assert "\n" not in str(caught.value)


def test_a_name_like_that_of_a_topic_is_told(ask, make_topic):
    topic = make_topic()
    with pytest.raises(UnknownTableError, match=rf"did you mean {topic}\?"):
        ask(f"select * from `{topic[:-1]}`")


def test_reasons_keep_what_a_user_can_use():
    assert reason(ValueError("\n[A.B] It broke. SQLSTATE: 22012\n== SQL ==")) == (
        "It broke"
    )
    assert reason(ValueError("x\nmpbroker.e.ApiError: no such\n")) == "no such"
    assert reason(ValueError()) == "ValueError"


ROWS = pa.table(
    {
        "carrier": ["AA", None],
        "delay": [5.254321987, 1234567.8],
        "key": [b"k", b"\xff"],
        "at": pa.array([0, 1], pa.timestamp("us", tz="UTC")),
        "sum": [decimal.Decimal("1.50"), None],
        "tags": [["a"], []],
    }
)


@pytest.fixture
def shown(monkeypatch, capfdbinary):
    """Run the command with rows in place of Spark; return code, stdout, stderr."""

    def run(rows, *arguments):
        monkeypatch.setattr(command, "_run", lambda *_: rows)
        code = main(["sql", "q", *arguments])
        return code, *(text.decode() for text in capfdbinary.readouterr())

    return run


def test_rows_are_a_table_json_or_csv(shown):
    code, out, _ = shown(ROWS)
    assert code == ExitCode.OK
    head, first, second = out.splitlines()
    assert head.split() == ["carrier", "delay", "key", "at", "sum", "tags"]
    assert first.split() == ["AA", "5.25432", "k", "1970-01-01", "00:00:00"] + [
        "1.50",
        '["a"]',
    ]
    assert second.startswith("-        1234567.8  0xff")
    code, out, _ = shown(ROWS, "--json")
    assert json.loads(out.splitlines()[0])["delay"] == 5.254321987
    assert json.loads(out.splitlines()[1])["key"] == "0xff"
    code, out, _ = shown(ROWS, "--csv")
    names, first, second = csv.reader(io.StringIO(out))
    assert (names[0], first[1], second[0]) == ("carrier", "5.254321987", "")
    code, out, err = shown(ROWS, "--csv", "--limit", "1")
    assert len(out.splitlines()) == 2
    assert "only the first 1 rows: --limit" in err


def test_rows_become_a_picture(shown, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot is an extra")
    moments = pa.array([0, 10**6, 2 * 10**6], pa.timestamp("us", tz="UTC"))
    for number, rows in enumerate(
        [
            pa.table({"carrier": ["AA", "UA"], "delay": [5.2, 7]}),
            pa.table({"carrier": ["AA", "UA"], "delay": [5.2, None], "n": [1, 2]}),
            pa.table({"at": moments, "n": [1, 3, 2]}),
            pa.table({"at": moments, "carrier": ["AA", "UA", "AA"], "n": [1, 3, 2]}),
        ]
    ):
        picture = tmp_path / f"{number}.png"
        code, out, _ = shown(rows, "--plot", str(picture))
        assert (code, out) == (ExitCode.OK, "")
        assert picture.read_bytes().startswith(b"\x89PNG")
    one = tmp_path / "x.svg"
    assert shown(pa.table({"a": ["x"]}), "--plot", str(one))[0] == ExitCode.USAGE
    assert shown(pa.table({"a": []}), "--plot", str(one))[0] == ExitCode.NOT_FOUND
    code, _, err = shown(ROWS, "--plot", "x.jpg")
    assert (code, "x.jpg: give a file that ends in .png" in err) == (2, True)
    assert not one.exists()


@pytest.mark.heavy
def test_the_command_is_quiet(put, bootstrap, make_topic):
    topic = make_topic()
    put(topic, map(orjson.dumps, FLIGHTS))
    query = f"select carrier, count(*) n from `{topic}` group by 1 order by 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "sql", "-b", bootstrap, query),
            *("--master", "local[1]"),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "JDK_JAVA_OPTIONS": QUICK_JAVA},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "carrier  n\nAA       2\nUA       1\n"


def test_no_such_topic_is_one_line_and_an_exit_code(
    spark, bootstrap, make_topic, monkeypatch, capfdbinary
):
    monkeypatch.setattr(mpbroker.spark, "session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    try:
        code = main(["sql", "-b", bootstrap, f"select * from `{make_topic()}-not`"])
    finally:
        spark.sparkContext.setLogLevel("ERROR")
    out, err = capfdbinary.readouterr()
    assert (code, out) == (ExitCode.NOT_FOUND, b"")
    assert err.count(b"\n") == 1
