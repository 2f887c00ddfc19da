"""Kafka's metadata records: those that a Kafka wrote, and any there and back."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.metadata.kraft_records import (
    MetadataRecordError,
    UnknownRecordError,
    decode_record,
    decode_versioned,
    encode_record,
)
from mpbroker.metadata.kraft_schema import OWN_TAG, RECORD_ROWS
from mpbroker.metadata.meta_properties import uuid_to_text
from mpbroker.protocol.records.record_batch import (
    iter_batches,
    iter_records,
)
from tests.support.kraft import kafka_dump, kafka_log

VALUES = [
    bytes(record.value)
    for header, batch in iter_batches(kafka_log())
    if not header.is_control
    for record in iter_records(batch)
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)


def kafka_name(name: str) -> str:
    """Return TOPIC_RECORD for TopicRecord, as kafka-dump-log prints it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def ints(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


SCALARS = {
    "bool": st.booleans(),
    "int8": ints(8),
    "int16": ints(16),
    "uint16": st.integers(0, 0xFFFF),
    "int32": ints(32),
    "int64": ints(64),
    "float64": st.floats(allow_nan=False),
    "string": TEXT,
    "bytes": st.sampled_from(["", "AA==", "AAEC" * 50]),
    "uuid": st.binary(min_size=16, max_size=16).map(uuid_to_text),
}


def values(field):
    kind = field.kind.removeprefix("?")
    if kind == "[]":
        made = st.lists(structs(field.fields, 99), max_size=3)
    elif kind.startswith("[]"):
        made = st.lists(SCALARS[kind[2:]], max_size=4)
    else:
        made = SCALARS[kind]
    if kind != field.kind and field.tag < 0:
        made |= st.none()
    # A tagged field with its default is not written.
    return made.filter(lambda value: field.tag < 0 or value != field.default)


def structs(fields, version):
    there = [field for field in fields if field.since <= version]
    return st.fixed_dictionaries(
        {field.name: values(field) for field in there if field.tag < 0},
        optional={field.name: values(field) for field in there if field.tag >= 0},
    )


@st.composite
def records(draw):
    row = draw(st.sampled_from(list(RECORD_ROWS.values())))
    version = draw(st.integers(0, row.newest))
    return {"type": row.name, **draw(structs(row.fields, version))}, version


def test_records_of_a_kafka_are_read_as_its_own_tool_prints_them():
    printed = []
    for value in VALUES:
        record, version = decode_versioned(value)
        name = kafka_name(record.pop("type"))
        printed.append({"type": name, "version": version, "data": record})
    assert printed == kafka_dump()
    assert len({each["type"] for each in printed}) >= 16


@pytest.mark.parametrize("value", VALUES[:40], ids=lambda value: value[1])
def test_records_of_a_kafka_are_written_as_it_wrote_them(value):
    assert encode_record(*decode_versioned(value)) == value


@given(records())
def test_a_record_of_each_version_is_read_as_it_was_written(record_and_version):
    record, version = record_and_version
    assert decode_versioned(encode_record(record, version)) == (record, version)


@given(records())
def test_by_default_the_lowest_version_that_has_the_fields_is_written(made):
    record, version = made
    found, lowest = decode_versioned(encode_record(record))
    assert found == record
    assert lowest <= version


@given(st.sampled_from(VALUES), st.data())
def test_bent_bytes_give_a_record_or_an_error_of_ours_and_nothing_else(value, data):
    bent = bytearray(value)
    for _ in range(data.draw(st.integers(1, 3))):
        bent[data.draw(st.integers(0, len(bent) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bent)))
    for candidate in (bytes(bent), bytes(bent[:cut])):
        with suppress(MetadataRecordError):
            decode_record(candidate)


def test_types_and_versions_of_a_newer_kafka_are_named():
    with pytest.raises(UnknownRecordError, match=r"record type 99 \(version 1\)"):
        decode_record(b"\x01\x63\x01\x00")
    with pytest.raises(UnknownRecordError, match="TopicRecord version 7"):
        decode_record(b"\x01\x02\x07\x00")
    with pytest.raises(UnknownRecordError, match="frame version 0"):
        decode_record(b"\x00\x02\x00\x00")


def test_fields_of_our_own_are_tags_that_kafka_skips():
    record = {"type": "RemoveAccessControlEntryRecord", "id": "A" * 22}
    ours = encode_record({**record, "request": "abc"})
    assert decode_record(ours) == {**record, "request": "abc"}
    assert ours.startswith(encode_record(record)[:-1])
    tags = {f.tag for row in RECORD_ROWS.values() for f in row.fields}
    assert {tag for tag in tags if tag > 100} == {OWN_TAG, OWN_TAG + 1}


@pytest.mark.parametrize(
    "record",
    [
        {"type": "TopicRecord", "name": "a", "topicId": "short"},
        {"type": "TopicRecord", "name": None},
        {"type": "TopicRecord", "colour": "red"},
        {"type": "FeatureLevelRecord", "featureLevel": 1 << 15},
        {"type": "UserScramCredentialRecord", "salt": "???"},
        {"type": "NoSuchRecord"},
        {},
    ],
)
def test_values_that_do_not_fit_are_refused(record):
    with pytest.raises(MetadataRecordError):
        encode_record(record)
