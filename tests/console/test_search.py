"""The scan of raw batches finds what a look at each record finds."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.console import message_search
from mpbroker.console.message_pages import Fetched, Look
from mpbroker.console.message_search import (
    Searchers,
    scan_batches,
    search_messages,
)
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    MAGIC_POSITION,
    RecordBatchError,
    UnsupportedMagicError,
    iter_batches,
    set_base_offset,
)
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_records,
)

LATE = float("inf")


def batch(values, codec=Codec.NONE, offset=0, is_control=False):
    builder = RecordBatchBuilder(codec=codec, control=is_control)
    for value in values:
        builder.append(0, value, value[::-1], [("h", value)])
    made = bytearray(builder.build())
    set_base_offset(memoryview(made), offset)
    return bytes(made)


texts = st.text(alphabet="ab", max_size=6).map(str.encode)
batches = st.lists(
    st.tuples(
        st.lists(texts, min_size=1, max_size=4), st.sampled_from(Codec), st.booleans()
    ),
    max_size=8,
)


@given(batches, st.text(alphabet="ab", min_size=1, max_size=3).map(str.encode))
def test_each_batch_with_a_match_is_named_and_no_control_batch(made, needle):
    data, offset, wanted, controls, starts = b"", 0, set(), set(), set()
    for values, codec, is_control in made:
        starts.add(len(data))
        if is_control:
            controls.add(len(data))
        elif any(needle in value or needle in value[::-1] for value in values):
            wanted.add(len(data))
        data += batch(values, codec, offset, is_control)
        offset += len(values)
    scan = scan_batches(data, needle, LATE)
    assert wanted <= set(scan.places) <= starts - controls
    assert (scan.size, scan.next_offset) == (len(data), offset or -1)
    assert scan_batches(memoryview(data), needle, LATE) == scan


def test_a_batch_that_is_cut_off_is_left_for_the_next_fetch():
    whole = batch([b"needle"], offset=5)
    cut = batch([b"needle"] * 100, offset=6)[:200]
    assert scan_batches(whole + cut, b"needle", LATE) == ([0], 6, len(whole))
    assert scan_batches(cut, b"needle", LATE) == ([], -1, 0)
    assert scan_batches(b"", b"needle", LATE) == ([], -1, 0)


def test_bytes_over_the_border_of_two_batches_hide_no_match():
    first = batch([b"x"])
    second = batch([b"needle"], offset=1)
    # The end of the one, the head of the other: no record has it.
    needle = first[-2:] + second[:3]
    assert scan_batches(first + second, needle, LATE).places == [0]
    assert scan_batches(first + second, b"needle", LATE).places == [len(first)]


def test_decompression_ends_at_the_deadline_and_goes_on_behind():
    """Some KB may stand for 64 MiB: the time is looked at behind each of them."""
    zeros = [bytes(100_000)]
    data = batch(zeros, Codec.GZIP) + batch(zeros, Codec.GZIP, offset=1)
    first = len(batch(zeros, Codec.GZIP))
    assert scan_batches(data, b"needle", time.monotonic()) == ([], 1, first)
    assert scan_batches(data[first:], b"needle", LATE) == ([], 2, len(data) - first)


def searched(monkeypatch, data, count, text, place="any"):
    """Search as the page does; return the offsets found, and where steps began.

    Each look at the clock takes a tenth of a second.
    """
    clock = itertools.count(step=0.1)
    monkeypatch.setattr(
        message_search, "time", SimpleNamespace(monotonic=clock.__next__)
    )

    def fetch(_, __, at, ___):
        """Return batches from the one with the offset on, as a broker does."""
        gone = sum(
            header.size_in_bytes
            for header, _ in iter_batches(data)
            if header.next_offset <= at
        )
        return Fetched(at, count, data[gone:], ())

    monkeypatch.setattr(message_search, "fetch", fetch)
    partition = SimpleNamespace(
        where=SimpleNamespace(partition=0), offset_at=lambda *_: 0
    )
    found, begun = [], [0]
    while begun[-1] < count:
        page = search_messages(None, partition, begun[-1], text, place, Look("hex"))
        found += [row["offset"] for row in page["rows"]]
        assert page["next"] > begun[-1]
        begun.append(page["next"])
    return found, begun


@given(batches, st.text(alphabet="ab", max_size=3), st.sampled_from(["any", "key"]))
def test_a_search_in_steps_finds_what_a_look_at_each_record_finds(made, text, place):
    data, offset, wanted, needle = b"", 0, [], text.encode()
    for values, codec, _ in made:
        data += batch(values, codec, offset)
        for value in values:
            if value == needle or (
                place == "any" and (needle in value or needle in value[::-1])
            ):
                wanted.append(offset)
            offset += 1
    with pytest.MonkeyPatch.context() as patch:
        assert searched(patch, data, offset, text, place)[0] == wanted


def test_a_step_of_a_search_ends_within_a_batch_and_the_next_skips_its_records(
    monkeypatch,
):
    """All records have the text, but in a header, so each of them is decoded."""
    codec, count, decoded = Codec.ZSTD, 5000, []
    builder = RecordBatchBuilder(codec=codec)
    for number in range(count):
        builder.append(number, b"%d" % number, None, [("h", b"needle")])
    builder.append(count, b"the needle", None, [])
    one = message_search.iter_payload
    monkeypatch.setattr(
        message_search,
        "iter_payload",
        lambda *args: decoded.append(1) or one(*args),
    )
    found, begun = searched(monkeypatch, builder.build(), count + 1, "needle")
    steps = [after - at for at, after in itertools.pairwise(begun)]
    assert found == [count] and max(steps) < 12
    assert len(decoded) < sum(steps) + len(steps) * 1100  # not from the beginning


def test_a_record_that_does_not_end_is_refused():
    made = bytearray(batch([b"needle"] * 3))
    place = made.index(b"needle")
    for number in (0, 1, 0xFE, 0xFF):
        made[BATCH_HEADER_SIZE] = number
        data = bytes(made)
        fetched, scan = Fetched(0, 3, data, ()), scan_batches(data, b"needle", LATE)
        assert scan.places == [0] and place > BATCH_HEADER_SIZE
        with pytest.raises(RecordBatchError):
            list(message_search._found(fetched, scan, b"needle"))


def test_what_is_no_batch_is_refused():
    made = bytearray(batch([b"x"] * 20))
    made[MAGIC_POSITION] = 1
    with pytest.raises(UnsupportedMagicError):
        scan_batches(bytes(made), b"x", LATE)
    with pytest.raises(RecordBatchError, match="batch_length"):
        scan_batches(b"\0" * 16 + b"\2" + b"\0" * 100, b"x", LATE)


def test_names_of_batches_are_those_that_a_walk_gives():
    data = (
        batch([b"one"]) + batch([b"two"], Codec.ZSTD, 1) + batch([b"three"], offset=2)
    )
    scan = scan_batches(data, b"t", LATE)
    found, place = [], 0
    for header, each in iter_batches(data):
        if place in scan.places:
            found += [record.key for record in iter_records(each)]
        place += header.size_in_bytes
    assert found == [b"two", b"three"]


def test_a_search_leaves_the_processors_to_others_and_pages_do_not():
    def look():
        return {"nice": os.getpriority(os.PRIO_PROCESS, 0)}

    before = look()
    searchers = Searchers()
    assert searchers.run(look)["nice"] == min(19, before["nice"] + 10)
    assert look() == before

    def fail():
        raise KeyError("topic")

    with pytest.raises(KeyError, match="topic"):
        searchers.run(fail)
