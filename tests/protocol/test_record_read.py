"""Records of a caller's own class are those of `iter_records`, from either twin."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.records import record_read
from mpbroker.protocol.records.batch_header import LOG_APPEND_TIME
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import (
    BATCH_HEADER_SIZE,
    RecordBatchError,
    iter_records,
    parse_batch_header,
    set_base_offset,
)
from mpbroker.protocol.records.record_read import (
    RecordShape,
    read_records,
    read_records_in_python,
)
from tests.protocol.test_record_columns import RECORDS, build


class Place(NamedTuple):
    topic: str
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: Any
    tail: object


TAIL = object()
SHAPE = RecordShape(Place, ("t",), (TAIL,))


@pytest.fixture(params=["compiled", "python"])
def twin(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(record_read, "_read_records", read_records_in_python)
    elif not record_read.IS_COMPILED:
        pytest.skip("built without a compiler")


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
@pytest.mark.parametrize("options", [{}, {"timestamp_type": LOG_APPEND_TIME}])
def test_the_records_of_a_batch_are_read_from_an_offset_on(codec, options):
    @given(RECORDS, st.integers(0, 1 << 40), st.integers(-3, 25))
    def check(records, base_offset, skipped):
        batch = bytearray(build(records, codec, **options))
        set_base_offset(batch, base_offset)
        first = base_offset + skipped
        found = read_records(parse_batch_header(batch), batch, first, SHAPE)
        assert found == [
            Place("t", *record, TAIL)
            for record in iter_records(batch)
            if record.offset >= first
        ]
        assert all(type(record) is Place for record in found)

    check()


@given(RECORDS, st.data())
def test_any_damage_is_refused_or_read_alike_by_both_twins(records, data):
    if not record_read.IS_COMPILED:
        pytest.skip("built without a compiler")
    payload = bytearray(build(records)[BATCH_HEADER_SIZE:])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut = data.draw(st.integers(0, len(payload)))
    content = bytes(payload[: data.draw(st.sampled_from([cut, len(payload)]))])
    count = data.draw(st.integers(-1, len(records) + 1))
    numbers = st.integers(-(1 << 63), (1 << 63) - 1)
    base = data.draw(numbers), data.draw(numbers)
    first = data.draw(st.integers(-1, 5))
    arguments = (content, count, first, *base, data.draw(st.booleans()), SHAPE)
    compiled = record_read._records.read_records(*arguments)
    try:
        by_hand = read_records_in_python(*arguments)
    except RecordBatchError:
        assert compiled[0] != 0
        assert compiled[2] is None
    else:
        assert compiled == by_hand


def test_the_compiled_twin_refuses_what_is_no_tuple():
    if not record_read.IS_COMPILED:
        pytest.skip("built without a compiler")
    shape = RecordShape(list, (), ())  # type: ignore[type-var]
    with pytest.raises(TypeError, match="subclass of tuple"):
        record_read._records.read_records(b"", 0, 0, 0, 0, False, shape)
