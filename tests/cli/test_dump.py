"""`mpbroker dump`: kafka-dump-log's words, and damage that is found."""

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.index_dump import read_offset_index, read_time_index
from mpbroker.cli.root import root
from mpbroker.cli.segment_dump import iter_segment
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder, set_base_offset
from tests.support.kraft import kafka_dump, kafka_dump_text, kafka_log

START = 1_700_000_000_000
JARS = Path(__file__).parents[2] / ".downloads" / "java"


def at(offset: int, batch: bytes) -> bytes:
    placed = bytearray(batch)
    set_base_offset(memoryview(placed), offset, 3)
    return bytes(placed)


def plain(offset: int, count: int, codec: Codec = Codec.NONE) -> bytes:
    builder = RecordBatchBuilder(codec)
    for index in range(count):
        headers = [("h", b"1"), ("g", None)] if index == 1 else []
        key = None if index % 3 == 0 else b"k%d" % index
        value = None if index == 4 else f"é {index}".encode()
        builder.append(START + offset + index, key, value, headers)
    return at(offset, builder.build())


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A segment with everything in it, and its indexes."""
    stem = tmp_path / "t-0" / f"{0:020}"
    stem.parent.mkdir()
    log, index, time_index = bytearray(), bytearray(), bytearray()
    for number, codec in enumerate(Codec):
        index += struct.pack(">ii", number * 10 + 9, len(log))
        time_index += struct.pack(">qi", START + number * 10 + 9, number * 10 + 9)
        log += plain(number * 10, 10, codec)
    builder = RecordBatchBuilder(
        producer_id=77, producer_epoch=2, base_sequence=5, transactional=True
    )
    builder.append(START, b"a", b"b")
    builder.append(START, b"", b"")
    log += at(50, builder.build())
    builder = RecordBatchBuilder(timestamp_type=1)
    builder.append(START, b"a", b"b")
    log += at(52, builder.build(max_timestamp=START + 60))
    for offset, commit in ((53, True), (54, False)):
        marker = EndTransactionMarker(commit, 4)
        log += at(offset, build_end_transaction_marker(77, 2, marker, START))
    stem.with_suffix(".log").write_bytes(log)
    stem.with_suffix(".index").write_bytes(index)
    stem.with_suffix(".timeindex").write_bytes(time_index)
    return stem.with_suffix(".log")


def test_a_batch_is_a_line_in_kafka_dump_logs_words(mpbroker, segment):
    result = mpbroker("dump", segment)
    lines = result.out.decode().splitlines()
    assert result.code == 0
    assert lines[:2] == [f"Dumping {segment}", "Log starting offset: 0"]
    assert lines[7].startswith(
        "baseOffset: 50 lastOffset: 51 count: 2 baseSequence: 5 lastSequence: 6"
        " producerId: 77 producerEpoch: 2 partitionLeaderEpoch: 3 isTransactional: true"
        " isControl: false deleteHorizonMs: OptionalLong.empty position: "
    )
    assert f" CreateTime: {START} size: 77 magic: 2 compresscodec: none" in lines[7]
    assert lines[7].endswith(" isvalid: true")
    assert len(lines) == 11


def test_records_are_shown_with_keys_and_values_if_asked_for(mpbroker, segment):
    lines = mpbroker("dump", "--print-data-log", segment).out.decode().splitlines()
    assert lines[4] == (
        f"| offset: 1 CreateTime: {START + 1} keySize: 2 valueSize: 4 sequence: -1"
        " headerKeys: [h,g] key: k1 payload: é 1"
    )
    assert lines[-1].endswith("endTxnMarker: ABORT coordinatorEpoch: 4")
    deep = mpbroker("dump", "--deep-iteration", segment).out.decode().splitlines()
    assert deep[4] == lines[4].partition(" key: k1")[0]
    bare = mpbroker("dump", "--print-data-log", "--skip-record-metadata", segment)
    assert bare.out.decode().splitlines()[4] == "| key: k1 payload: é 1"


def test_indexes_are_shown_and_a_directory_is_all_of_its_files(mpbroker, segment):
    text = mpbroker("dump", segment.parent).out.decode()
    assert "offset: 19 position: " in text
    assert f"timestamp: {START + 49} offset: 49" in text
    assert text.count("Dumping ") == 3
    sane = mpbroker("dump", "--index-sanity-check", segment.with_suffix(".index"))
    assert sane.out.decode().endswith(" passed sanity check.\n")


def test_json_has_a_line_for_each_batch_and_entry(mpbroker, segment):
    result = mpbroker("dump", "--format", "json", "--print-data-log", segment)
    batches = list(map(json.loads, result.out.splitlines()))
    assert [batch["compresscodec"] for batch in batches[:5]] == [
        codec.name.lower() for codec in Codec
    ]
    assert batches[0]["records"][1]["payload"] == "é 1"
    assert batches[0]["records"][4]["payload"] is None
    assert batches[-1]["records"][0]["control"].startswith("endTxnMarker: ABORT")
    index = mpbroker("dump", "--format", "json", segment.with_suffix(".index"))
    assert json.loads(index.out.splitlines()[1])["offset"] == 19


@pytest.mark.skipif(not JARS.is_dir(), reason="Kafka's jars were not fetched")
@pytest.mark.parametrize("damage", [False, True])
def test_the_output_is_that_of_kafka_dump_log(mpbroker, segment, damage):
    if damage:
        with segment.open("ab") as file:
            file.write(plain(60, 1)[:-1])
    files = ",".join(
        str(segment.with_suffix(suffix)) for suffix in (".log", ".index", ".timeindex")
    )
    arguments = ["--print-data-log", "--files", files]
    theirs = subprocess.run(
        [
            "java",
            "-cp",
            f"{JARS}/*",
            "org.apache.kafka.tools.DumpLogSegments",
            *arguments,
        ],
        capture_output=True,
        check=True,
    )
    assert mpbroker("dump", *arguments).out == theirs.stdout


@pytest.fixture
def metadata_log(tmp_path: Path) -> Path:
    """A metadata log that Apache Kafka 4.3.1 wrote."""
    path = tmp_path / "__cluster_metadata-0" / f"{0:020}.log"
    path.parent.mkdir()
    path.write_bytes(kafka_log())
    return path


def test_a_metadata_log_is_shown_as_kafka_showed_it(mpbroker, metadata_log):
    result = mpbroker("dump", "--cluster-metadata-decoder", metadata_log)
    assert result.code == 0
    shown = result.out.partition(b"\n")[2]
    assert shown == kafka_dump_text()
    assert b"LeaderChange: {" in shown and b"PARTITION_CHANGE_RECORD" in shown
    as_json = mpbroker(
        "dump", "--cluster-metadata-decoder", "--format", "json", metadata_log.parent
    )
    batches = map(json.loads, as_json.out.splitlines())
    records = [record for batch in batches for record in batch["records"]]
    assert [r["payload"] for r in records if "payload" in r] == kafka_dump()


def test_an_unknown_metadata_record_is_told_with_its_offset(mpbroker, metadata_log):
    builder = RecordBatchBuilder()
    builder.append(START, None, b"\x01\x63\x00\x00")
    metadata_log.write_bytes(kafka_log() + at(169, builder.build()))
    result = mpbroker("dump", "--cluster-metadata-decoder", metadata_log)
    assert result.code == ExitCode.ERROR
    assert "offset 169: record type 99 (version 0)" in result.err


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bootstrap", "KRaft bootstrap snapshot"),
        (f"{42:020}-{3:010}", "Snapshot end offset: 42, epoch: 3"),
    ],
)
def test_a_snapshot_says_where_it_ends(mpbroker, metadata_log, name, line):
    snapshot = metadata_log.with_name(name + ".checkpoint")
    metadata_log.rename(snapshot)
    shown = mpbroker("dump", "--cluster-metadata-decoder", snapshot.parent).out
    assert shown.decode().splitlines()[1] == line
    assert shown.endswith(kafka_dump_text().partition(b"\n")[2])


def test_a_snapshot_of_another_name_is_refused(mpbroker, tmp_path):
    (tmp_path / "7.checkpoint").touch()
    result = mpbroker("dump", tmp_path / "7.checkpoint")
    assert result.code == ExitCode.ERROR
    assert "its end offset in 20 digits" in result.err


# -- damage ----------------------------------------------------------------------------


def test_a_batch_with_a_wrong_crc_is_not_valid(mpbroker, segment):
    data = bytearray(segment.read_bytes())
    data[80] ^= 1
    segment.write_bytes(data)
    result = mpbroker("dump", segment)
    assert result.code == ExitCode.ERROR
    assert result.out.decode().splitlines()[2].endswith(" isvalid: false")
    assert "the batch at position 0 (base offset 0) has a wrong CRC" in result.err


def test_a_torn_tail_is_counted(mpbroker, segment):
    with segment.open("ab") as file:
        file.write(plain(60, 3)[:-5])
    result = mpbroker("dump", segment)
    assert result.code == ExitCode.ERROR
    left = len(plain(60, 3)) - 5
    found = f"Found {left} invalid bytes at the end of {segment.name}\n"
    assert result.out.decode().endswith(found)
    assert "the last batch is cut off" in result.err


def test_gaps_are_told_but_are_no_damage(mpbroker, segment):
    segment.write_bytes(plain(0, 2) + plain(7, 1))
    result = mpbroker("dump", "--deep-iteration", segment)
    assert result.code == 0
    assert "1 is followed by 7" in result.err


def test_an_index_that_disagrees_with_its_segment_is_found(mpbroker, segment):
    index = segment.with_suffix(".index")
    data = bytearray(index.read_bytes())
    data[11] += 1  # the second entry's relative offset
    index.write_bytes(data)
    result = mpbroker("dump", "--verify-index-only", index)
    assert result.code == ExitCode.ERROR
    assert f"Mismatches in :{index}" in result.err
    assert "  Index offset: 20, log offset: 19" in result.err


def test_a_time_index_that_disagrees_with_its_segment_is_found(mpbroker, segment):
    index = segment.with_suffix(".timeindex")
    entries = [(START + 1, 9), (START + 1, 19), (START + 29, 28)]
    index.write_bytes(b"".join(struct.pack(">qi", *entry) for entry in entries))
    result = mpbroker("dump", index)
    assert result.code == ExitCode.ERROR
    assert f"  Index timestamp: {START + 1}, log timestamp: {START + 9}" in result.err
    assert "Found out of order timestamp in" in result.err
    assert "Indexed offset: 28, found log offset: 29" in result.err


def test_what_kafka_has_preallocated_is_no_entry():
    used = struct.pack(">ii", 9, 100)
    assert len(read_offset_index(memoryview(used + bytes(80)), 0)) == 1
    assert read_offset_index(memoryview(bytes(80)), 0) == []
    timed = struct.pack(">qi", START, 9)
    assert len(read_time_index(memoryview(timed + bytes(120)), 0)) == 1
    assert read_time_index(memoryview(bytes(120)), 0) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (f"{1:020}.log", ExitCode.NOT_FOUND),
        ("readme.txt", ExitCode.ERROR),
        ("hello.log", ExitCode.ERROR),
        ("", ExitCode.NOT_FOUND),
    ],
)
def test_what_is_no_segment_is_named(mpbroker, tmp_path, name, code):
    (tmp_path / "readme.txt").touch()
    (tmp_path / "hello.log").touch()
    (tmp_path / "empty").mkdir()
    path = tmp_path / name if name else tmp_path / "empty"
    result = mpbroker("dump", path)
    assert result.code == code
    assert os.fspath(path) in result.err


def test_an_empty_segment_is_empty(mpbroker, tmp_path):
    (tmp_path / f"{0:020}.log").touch()
    assert mpbroker("dump", tmp_path).code == 0


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_damage_ends_the_segment_where_it_begins(junk, cut):
    good = plain(0, 3)
    data = (good + plain(3, 3))[: len(good) + cut] + junk
    batches = list(iter_segment(memoryview(data)))
    assert batches[0].is_valid and batches[0].header.record_count == 3
    end = batches[-1].position + batches[-1].header.size_in_bytes
    assert end <= len(data)


@given(st.binary(max_size=100), st.integers(0, 2**40))
def test_any_bytes_are_read_as_an_index(data, base_offset):
    read_offset_index(memoryview(data), base_offset)
    read_time_index(memoryview(data), base_offset)


@pytest.mark.parametrize("name", ["flights-0", "00000000000000000000.log", "x.txt"])
def test_what_is_not_there_is_not_found_whatever_its_name(mpbroker, tmp_path, name):
    result = mpbroker("dump", tmp_path / name)
    assert result.code == ExitCode.NOT_FOUND
    assert f"{tmp_path / name}: no such file or directory" in result.err


def test_a_comma_at_the_end_names_no_directory(mpbroker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{0:020}.log").touch()
    assert mpbroker("dump", "--files", ",").code == ExitCode.USAGE
    shown = mpbroker("dump", "--files", f"{0:020}.log,").out.decode()
    assert shown.count("Dumping") == 1


def test_an_object_of_a_remote_store_is_dumped_as_the_segment(segment: Path) -> None:
    key = segment.with_name(f"{segment.stem}-{'ab' * 16}.log")
    key.write_bytes(segment.read_bytes())
    runner = CliRunner()
    options = {"standalone_mode": False}
    wanted = runner.invoke(root, ["dump", "--deep-iteration", str(segment)], **options)
    for name in (str(key), f"file://{key}"):
        found = runner.invoke(root, ["dump", "--deep-iteration", name], **options)
        assert found.return_value == wanted.return_value
        assert found.output.splitlines()[0] == f"Dumping {name}"
        assert found.output.splitlines()[1:] == wanted.output.splitlines()[1:]
    gone = runner.invoke(root, ["dump", f"file://{key.parent}/0.log"], **options)
    assert isinstance(gone.exception, CliError)
    assert gone.exception.exit_code == ExitCode.NOT_FOUND
    other = runner.invoke(root, ["dump", f"file://{key.parent}/manifest"], **options)
    assert "not a .log object" in str(other.exception)
