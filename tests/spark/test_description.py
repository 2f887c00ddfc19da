"""Every key of a description takes what it took, and refuses the rest by name."""

from __future__ import annotations

import datetime
import pickle
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.spark.pipeline.description import STRUCTS, parse
from mpbroker.spark.pipeline.errors import PipelineError

SCHEMA = '{"type":"record","name":"r","fields":[{"name":"n","type":"long"}]}'
# A description of each job with every section that the job may have.
JOBS = {
    "ingest": {
        "pipeline": {"job": "ingest", "checkpoint": "/c"},
        "source": {"bootstrap": "h:1", "subscribe": "t"},
        "value": {"format": "json", "fields": {"n": "int", "at": "timestamp"}},
        "table": {"path": "/t"},
        "topic": {"topic": "t"},
        "dead_letter": {"path": "/d"},
        "maintain": {},
        "spark": {},
    },
    "ingest of late rows": {
        "pipeline": {"job": "ingest", "checkpoint": "/c"},
        "source": {"bootstrap": "h:1", "subscribe": "t"},
        "table": {"path": "/t", "late_after": "1d", "late": "aside"},
        "late": {"path": "/l"},
    },
    "aggregate": {
        "pipeline": {"job": "aggregate", "checkpoint": "/c"},
        "source": {"bootstrap": "h:1", "subscribe": "t"},
        "value": {"format": "json", "fields": {"n": "int", "at": "timestamp"}},
        "aggregate": {"window": "1 minute", "measures": {"n": "count(*)"}},
        "topic": {"topic": "t"},
    },
    "replay": {
        "pipeline": {"job": "replay"},
        "table": {"path": "/t"},
        "topic": {"topic": "t"},
        "replay": {},
    },
    "report": {"pipeline": {"job": "report"}, "report": {"log": "l", "out": "o"}},
}
ACCEPTED = {
    "pipeline.name": ["a", "-", "0.x_y", "a" * 100],
    "pipeline.checkpoint": ["c", "s3://b/c"],
    "pipeline.trigger": ["once", "1ms", " 5 m ", "2min", "2h"],
    "value.format": ["json", "msgpack"],
    "value.fields": [{"n": "date"}, {"n": "int", "at": "boolean"}],
    "value.schema": ["", "x"],
    "value.confluent_header": [False],
    "value.schema_id": [-1],
    "value.unknown_fields": ["ignore", "dead_letter"],
    "value.envelope": ["none"],
    "value.registry": [""],
    "value.registry_auth_env": ["", "NAME"],
    "value.registry_ca": ["", "/ca.pem"],
    "value.message": ["", "demo.Flight"],
    "value.subject": [[], ["flights-value"]],
    "table.path": ["x", "/x/", "s3://b/x"],
    "table.format": ["parquet", "delta", "iceberg"],
    "table.partition_by": [[], ["date", "n", "_topic"]],
    "table.event_time": ["", "at", "_timestamp"],
    "table.compression": ["zstd", "snappy", "gzip", "none"],
    "table.compact_mb": [1, 1.5, 1e11],
    "table.compact_every": [0, 2.5],
    "table.late_after": ["", "1d"],
    "table.identifier": [""],  # with Iceberg: test_iceberg
    "table.catalog": [{}],
    "table.key": [[]],  # with Delta: test_changes
    "table.late": ["keep"],
    "late.path": ["x", "s3://b/x"],
    "late.format": ["parquet", "delta"],
    "dead_letter.path": ["x"],
    "dead_letter.format": ["parquet", "delta", "iceberg"],
    "dead_letter.identifier": [""],
    "maintain.keep_snapshots": ["7d", "1h"],
    "maintain.keep_rows": ["", "90d"],
    "source.x": ["a", 1, 1.5, True, datetime.date(2013, 1, 1)],
    "spark.x": ["a", 1, 1.5, True],
    "aggregate.window": ["1 day"],
    "aggregate.slide": ["", "1 day"],
    "aggregate.watermark": ["1 day"],
    "aggregate.measures": [{"a": 1}, {"a": "b"}],
    "aggregate.group_by": [[], ["n", "_topic"]],
    "aggregate.event_time": ["", "at"],
    "topic.x": ["a", 1, 1.5, True],
    "replay.where": ["", "n > 1"],
    "replay.rate": [0, 1.5],
    "replay.speed": [0, 1.5],
    "replay.partitions": ["original", "key"],
    "report.log": ["a", ["a", "b"], [""]],
    "report.out": ["a"],
    "report.table": ["", "a"],
}
NO_TEXT = [3, 1.5, True, ["x"], {"x": "y"}, datetime.date(2013, 1, 1)]
NO_NUMBER = ["1", True, [1], -1, 1e12, 10**30, float("nan"), float("inf")]
# By key and what the error says is allowed.
REFUSED = {
    ("pipeline.job", "ingest, aggregate, replay, report"): ["", 3, ["ingest"]],
    ("pipeline.name", "letters, digits"): ["", "_a", ".a", "a b", "a/b", "é", "a\n"],
    ("pipeline.name", "1 to 100"): ["a" * 101, *NO_TEXT],
    ("pipeline.checkpoint", "text, in quotes"): NO_TEXT,
    ("pipeline.trigger", "'once', or a duration"): ["", "soon", "5", "-1s", *NO_TEXT],
    ("value.format", "raw, json, msgpack, avro, registry"): ["", "JSON", 1],
    ("value.fields", "a section: [value.fields]"): ["n", ["n"], 3],
    ("value.schema", "text, in quotes"): NO_TEXT,
    ("value.confluent_header", "true or false"): [1, 0, "true", ["true"]],
    ("value.schema_id", "a whole number of 0 or more"): [-2, 1 << 31, 1.5, "7", True],
    ("value.unknown_fields", "ignore, dead_letter"): ["", 0],
    ("value.registry", "addresses such as http://"): [
        "h:1",
        "http://",
        "http://me:secret@h:1",
        *NO_TEXT,
    ],
    ("value.registry_auth_env", "text, in quotes"): NO_TEXT,
    ("value.registry_ca", "text, in quotes"): NO_TEXT,
    ("value.message", "text, in quotes"): NO_TEXT,
    ("value.subject", 'a list: ["a", "b"]'): ["s", [1]],
    ("table.path", "a directory"): ["", *NO_TEXT],
    ("table.format", "parquet, delta, iceberg"): ["hudi", 3],
    ("table.partition_by", 'a list: ["a", "b"]'): ["n", [1], {}],
    ("table.event_time", "text, in quotes"): NO_TEXT,
    ("table.compression", "zstd, snappy, gzip, none"): ["", "lz4", ["zstd"]],
    ("table.compact_mb", "a number of 1 or more"): [0, 0.5, *NO_NUMBER],
    ("table.compact_every", "a number of 0 or more"): NO_NUMBER,
    ("table.late_after", "30s, 5m, 1d"): ["once", "1", *NO_TEXT],
    ("table.identifier", "text, in quotes"): NO_TEXT,
    ("table.key", 'a list: ["a", "b"]'): ["n", [3]],
    ("value.envelope", "none, debezium"): ["", 1],
    ("table.catalog", "a section: [table.catalog]"): ["sqlite:///x", ["a"], 3],
    ("table.late", "keep, drop, aside"): ["", "lose", 1],
    ("late.path", "a directory"): ["", *NO_TEXT],
    ("late.format", "parquet, delta"): ["", 3],
    ("dead_letter.path", "a directory"): ["", *NO_TEXT],
    ("dead_letter.format", "parquet, delta, iceberg"): ["", 3],
    ("dead_letter.identifier", "text, in quotes"): NO_TEXT,
    ("maintain.keep_snapshots", "12h, 7d"): ["", "once", "1", *NO_TEXT],
    ("maintain.keep_rows", "12h, 90d"): ["once", "1", *NO_TEXT],
    ("source.x", "text or a number"): [["a"], {"a": "b"}],
    ("aggregate.window", "'10 minutes'"): ["", *NO_TEXT],
    ("aggregate.slide", "text, in quotes"): NO_TEXT,
    ("aggregate.watermark", "text, in quotes"): NO_TEXT,
    ("aggregate.measures", '{flights = "count(*)"}'): [{}, "x", []],
    ("aggregate.group_by", 'a list: ["a", "b"]'): ["n", [3]],
    ("aggregate.event_time", "text, in quotes"): NO_TEXT,
    ("topic.x", "text or a number"): [["a"], {"a": "b"}],
    ("replay.where", "text, in quotes"): NO_TEXT,
    ("replay.rate", "a number of 0 or more"): NO_NUMBER,
    ("replay.speed", "a number of 0 or more"): NO_NUMBER,
    ("replay.partitions", "original, key"): ["", 1],
    ("report.log", '["requests.log", "requests.log.*"]'): ["", [], 3, [3]],
    ("report.out", "a file name"): ["", *NO_TEXT],
    ("report.table", "text, in quotes"): NO_TEXT,
}


def changed(key, value):
    """Return a good description, changed in one key, of the job that has its section.

    `ingest` comes first, so sections that several jobs have are its own.
    """
    section, _, name = key.partition(".")
    job = next(each for each in JOBS.values() if section in each)
    sections = {each: dict(content) for each, content in job.items()}
    sections[section][name] = value
    return sections


def known_keys():
    return {
        f"{section}.{key}"
        for section, struct in STRUCTS.items()
        for key in struct.__struct_fields__
    }


def test_every_key_has_values_here_that_are_taken_and_refused():
    options = {"source.x", "topic.x"}
    assert set(ACCEPTED) == known_keys() - {"pipeline.job"} | options | {"spark.x"}
    assert {key for key, _ in REFUSED} == known_keys() | options


@pytest.mark.parametrize("job", JOBS)
def test_a_description_of_each_job_is_taken(job):
    assert parse(JOBS[job]).job == JOBS[job]["pipeline"]["job"]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in ACCEPTED for value in ACCEPTED[key]]
)
def test_a_key_takes_what_it_is_documented_to_take(key, value):
    parse(changed(key, value))


@pytest.mark.parametrize(
    ("key", "allowed", "value"),
    [(*names, value) for names, values in REFUSED.items() for value in values],
)
def test_a_refusal_names_the_key_its_value_and_what_is_allowed(key, allowed, value):
    with pytest.raises(PipelineError) as refused:
        parse(changed(key, value))
    assert str(refused.value).startswith(f"{key}={value!r} ")
    assert allowed in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        "pipeline.job",
        "table.path",
        "dead_letter.path",
        "late.path",
        "aggregate.window",
        "aggregate.measures",
        "report.log",
        "report.out",
    ],
)
def test_a_key_that_must_be_set_is_named_with_what_to_give(key):
    [allowed] = {text for name, text in REFUSED if name == key}
    sections = changed(key, None)
    section, _, name = key.partition(".")
    del sections[section][name]
    with pytest.raises(
        PipelineError, match=re.escape(f"{key} is not set; give ")
    ) as it:
        parse(sections)
    assert allowed in str(it.value)


@pytest.mark.parametrize("key", sorted(known_keys()))
def test_an_unknown_key_is_named_with_the_nearest_known_one(key):
    section, _, name = key.partition(".")
    sections = changed(f"{key}x", "x")
    expected = f"no key in [{section}] '{name}x' (did you mean '{name}'?); there are"
    with pytest.raises(PipelineError, match=re.escape(expected)):
        parse(sections)


@pytest.mark.parametrize("section", ["replay", "report"])
def test_a_section_of_another_job_may_hold_anything_under_known_names(section):
    names = STRUCTS[section].__struct_fields__
    found = parse({**JOBS["ingest"], section: dict.fromkeys(names, -1)})
    assert (found.replay, found.report) == (None, None)
    with pytest.raises(PipelineError, match="no key in"):
        parse({**JOBS["ingest"], section: {"strange": 1}})


@pytest.mark.parametrize(
    ("kind", "said"),
    [("itn", "'itn' is none of .*'int'"), (3, "3 is none of"), ([], "")],
)
def test_a_field_of_no_type_is_named(kind, said):
    with pytest.raises(PipelineError, match=rf"^value\.fields\.n={said}"):
        parse(changed("value.fields", {"at": "date", "n": kind}))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"format": "json"}, "needs [value.fields]"),
        ({"format": "raw", "fields": {"n": "int"}}, "has no fields"),
        ({"format": "avro"}, "needs value.schema"),
        ({"format": "avro", "schema": SCHEMA, "fields": {"n": "int"}}, "in its schema"),
        ({"format": "avro", "schema": "{"}, "value.schema is not JSON"),
        ({"format": "json", "fields": {"": "int"}}, "begin with '_'"),
        (
            {"format": "avro", "schema": SCHEMA, "confluent_header": True},
            "value.schema_id need each other",
        ),
        ({"format": "avro", "schema": SCHEMA, "schema_id": 7}, "need each other"),
        ({"format": "json", "fields": {"n": "int"}, "schema_id": 7}, "need each other"),
    ],
)
def test_a_format_without_what_it_needs_is_refused(value, said):
    with pytest.raises(PipelineError, match=re.escape(said)):
        parse({**JOBS["ingest"], "value": value})


@pytest.mark.parametrize(
    ("table", "late", "said"),
    [
        ({"late": "drop"}, None, "needs table.late_after"),
        ({"late": "aside", "late_after": "1d"}, None, "need each other"),
        ({"late": "drop", "late_after": "1d"}, "/l", "need each other"),
        ({"late_after": "1d"}, "/l", "[late] needs table.late = 'aside'"),
        ({"late": "drop", "late_after": "1d"}, None, ""),
        ({"late": "aside", "late_after": "1d"}, "/l", ""),
    ],
)
def test_late_rows_have_a_limit_and_a_place(table, late, said):
    sections = {**JOBS["ingest"], "table": {"path": "/t", **table}}
    if late:
        sections["late"] = {"path": late}
    if said:
        with pytest.raises(PipelineError, match=re.escape(said)):
            parse(sections)
    else:
        found = parse(sections)
        assert (found.late and found.late.path) == late
    windows = {**JOBS["aggregate"], "table": {"path": "/t", **table}}
    del windows["topic"]
    if table.get("late"):
        with pytest.raises(PipelineError, match="only ingest"):
            parse(windows)


def test_avros_fields_are_those_of_its_schema():
    value = {"format": "avro", "schema": SCHEMA}
    with_header = value | {"confluent_header": True, "schema_id": 0}
    assert parse({**JOBS["ingest"], "value": with_header}).value.schema_id == 0
    assert parse({**JOBS["ingest"], "value": value}).value.fields == {"n": "bigint"}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["once", "ingest", "json", "delta", "at", "date", SCHEMA])
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.sampled_from(sorted(JOBS)), st.sampled_from(sorted(ACCEPTED)), VALUES)
def test_any_value_makes_a_description_or_a_pipeline_error_and_nothing_else(
    job, key, value
):
    section, _, name = key.partition(".")
    sections = {**JOBS[job], section: {**JOBS[job].get(section, {}), name: value}}
    with suppress(PipelineError):
        found = parse(sections)
        # It travels to executors.
        assert repr(pickle.loads(pickle.dumps(found))) == repr(found)
