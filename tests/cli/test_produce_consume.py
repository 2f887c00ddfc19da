"""`mpbroker produce` and `mpbroker consume`, against a broker in a thread."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.records.delimiter import unescape
from mpbroker.cli.records.message_input import MessageSplitter
from mpbroker.cli.records.start_offset import OffsetRange, parse_offsets
from mpbroker.client.partitioner import partition_for_key
from mpbroker.producer import Producer
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.produce import (
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_records,
    parse_batch_header,
)
from tests.client.fake_broker import CLOSE, split_every
from tests.support.children import wait_until

ANY_BYTES = bytes(range(256))


def records(broker, topic="one", partition=0):
    batches = broker.logs[topic, partition]
    return [record for batch in batches for record in iter_records(batch)]


def pairs(broker, topic="one", partition=0):
    return [(record.key, record.value) for record in records(broker, topic, partition)]


def fill(broker, *rows, topic="one", partition=0, codec=Codec.NONE):
    """Append a batch of (timestamp, key, value, headers...) rows."""
    builder = RecordBatchBuilder(codec)
    for timestamp, key, value, *headers in rows:
        builder.append(timestamp, key, value, headers)
    broker.append(topic, partition, builder.build())


# -- cutting input ---------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=8), max_size=8),
    st.binary(min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_messages_do_not_depend_on_how_the_stream_was_cut(parts, delimiter, step):
    stream = delimiter.join(parts)
    expected = stream.split(delimiter)
    if not expected[-1]:
        expected.pop()
    splitter = MessageSplitter(delimiter)
    messages = []
    for piece in split_every(stream, step):
        messages += splitter.feed(piece)
    assert messages + splitter.finish() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\n", b"\n"),
        ("\\t\\r\\0\\\\", b"\t\r\0\\"),
        ("\\x1f|\\xFF", b"\x1f|\xff"),
        ("é::", "é::".encode()),
    ],
)
def test_delimiters_understand_escapes(text, expected):
    assert unescape(text) == expected


@pytest.mark.parametrize("text", ["\\", "\\q", "\\x1", "a\\xg0"])
def test_an_unknown_escape_is_an_error(text):
    with pytest.raises(ValueError, match="not an escape"):
        unescape(text)


# -- produce ---------------------------------------------------------------------------


def test_each_line_is_a_record(fake_broker, mpbroker):
    assert mpbroker("produce", "-t", "one", stdin=b"a\n\n\xff\0b\nlast").code == 0
    assert pairs(fake_broker) == [
        (None, b"a"),
        (None, b""),
        (None, b"\xff\0b"),
        (None, b"last"),
    ]
    (batch,) = fake_broker.logs["one", 0]
    assert parse_batch_header(batch).record_count == 4


def test_keys_headers_and_nulls(fake_broker, mpbroker):
    result = mpbroker(
        *["produce", "-t", "one", "-K", "::", "-k", "dflt", "-Z"],
        *["-H", "a=1=2", "-H", "b", "-H", "c="],
        stdin=b"k::v\nno key\n::x\nk::\n",
    )
    assert result.code == 0
    assert pairs(fake_broker) == [
        (b"k", b"v"),
        (b"dflt", b"no key"),
        (None, b"x"),
        (b"k", None),
    ]
    headers = [("a", b"1=2"), ("b", None), ("c", b"")]
    assert all(record.headers == headers for record in records(fake_broker))


def test_keys_go_where_java_puts_them(fake_broker, mpbroker):
    keys = [b"key-%d" % number for number in range(40)]
    lines = b"".join(key + b":v\n" for key in keys)
    mpbroker("produce", "-t", "t", "-K", ":", stdin=lines)
    for partition in range(3):
        assert [key for key, _ in pairs(fake_broker, "t", partition)] == [
            key for key in keys if partition_for_key(key, 3) == partition
        ]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_the_codec_is_the_one_asked_for(fake_broker, mpbroker, codec):
    mpbroker("produce", "-t", "one", "-z", codec, stdin=b"a\n" * 100)
    (batch,) = fake_broker.logs["one", 0]
    assert parse_batch_header(batch).codec.name.lower() == codec
    assert len(records(fake_broker)) == 100


def test_files_are_one_message_each_or_with_l_a_message_a_line(
    fake_broker, mpbroker, tmp_path
):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a\nb\n")
    two.write_bytes(ANY_BYTES)
    mpbroker("produce", "-t", "one", one, two)
    mpbroker("produce", "-t", "one", "-l", one)
    values = [value for _, value in pairs(fake_broker)]
    assert values == [b"a\nb\n", ANY_BYTES, b"a", b"b"]


def test_count_and_tee(fake_broker, mpbroker):
    result = mpbroker("produce", "-t", "one", "-c", 2, "-T", stdin=b"a\nb\nc\n")
    assert result.out == b"a\nb\n"
    assert len(records(fake_broker)) == 2


def test_json_says_how_many_were_written(fake_broker, mpbroker):
    result = mpbroker("produce", "-t", "one", "--format", "json", stdin=b"a\nb\n")
    assert json.loads(result.out) == {"topic": "one", "records": 2}


def refuse_one(code):
    return lambda request: ProduceResponse(
        responses=[
            TopicProduceResponse(
                name="one",
                partition_responses=[
                    PartitionProduceResponse(
                        index=0,
                        error_code=code,
                        base_offset=-1,
                    )
                ],
            )
        ]
    )


def test_a_refused_batch_is_an_error_that_names_its_records(fake_broker, mpbroker):
    fake_broker.answer_with(ApiKey.PRODUCE, refuse_one(ErrorCode.INVALID_RECORD))
    result = mpbroker("produce", "-t", "one", stdin=b"a\nb\n")
    assert result.code == ExitCode.ERROR
    assert result.err.startswith(
        "mpbroker: one: 2 records (of numbers 1-2 of the input) not written: 2"
        " record(s) for one-0: INVALID_RECORD"
    )


def test_an_error_that_meets_all_lines_ends_the_command(fake_broker, mpbroker):
    refusal = refuse_one(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    fake_broker.answer_with(ApiKey.PRODUCE, refusal)
    result = mpbroker("produce", "-t", "one", stdin=b"a\nb\n")
    assert result.code == ExitCode.ERROR
    said = "mpbroker: one: 2 of 2 records not written"
    assert result.err.splitlines()[-1] == said  # and nothing follows
    fake_broker.answer_with(ApiKey.PRODUCE, refusal)
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "produce", "-t", "one"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"a\nb\n")  # and more may follow
        process.stdin.flush()
        last = process.stderr.read().decode().splitlines()[-1]
        assert last == f"{said}; what follows them in the input was not sent"
        assert process.wait() == ExitCode.ERROR
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def test_a_batch_that_is_too_large_goes_in_parts(fake_broker, mpbroker):
    fake_broker.answer_with(ApiKey.PRODUCE, refuse_one(ErrorCode.MESSAGE_TOO_LARGE))
    assert mpbroker("produce", "-t", "one", stdin=b"a\nb\n").code == 0
    assert [value for _, value in pairs(fake_broker)] == [b"a", b"b"]
    assert len(fake_broker.logs["one", 0]) == 2


def test_without_a_producer_id_a_lost_answer_is_an_error_not_a_second_write(
    fake_broker, mpbroker
):
    fake_broker.answer_with(ApiKey.PRODUCE, lambda request: CLOSE)
    result = mpbroker("produce", "-t", "one", "-a", "1", stdin=b"a\n")
    assert result.code == ExitCode.UNAVAILABLE
    assert "may be written" in result.err
    assert len(fake_broker.seen(ApiKey.PRODUCE)) == 1


def test_settings_of_clients_come_from_the_command_line_and_a_file(
    fake_broker, mpbroker, tmp_path
):
    path = tmp_path / "client.properties"
    path.write_text("client.id=of-the-file\nlinger.ms=7\n")
    produce = ["produce", "-t", "one", "-F", path]
    assert mpbroker(*produce, "-X", "client.id=me", stdin=b"a\n").code == 0
    assert mpbroker(*produce, "-X", "lingr.ms=7", stdin=b"a\n").err == (
        "mpbroker: unknown producer setting 'lingr.ms'; did you mean linger.ms?\n"
    )
    assert mpbroker("topic", "list", "-X", "client.id").code == ExitCode.USAGE


def test_a_file_of_settings_may_name_the_brokers(
    fake_broker, mpbroker, monkeypatch, tmp_path
):
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", "127.0.0.1:1")  # where nobody listens
    path = tmp_path / "client.properties"
    path.write_text(f"bootstrap.servers={fake_broker.address}\n")
    assert mpbroker("topic", "list", "-F", path).out == b"one\nt\n"
    setting = f"bootstrap.servers={fake_broker.address}"
    assert mpbroker("topic", "list", "-X", setting).out == b"one\nt\n"
    # As for every setting, an option of its own wins, and -X over -F.
    elsewhere = "127.0.0.1:1"
    refused = mpbroker("topic", "list", "-b", elsewhere, "-X", setting)
    assert refused.code == ExitCode.UNAVAILABLE
    path.write_text(f"bootstrap.servers={elsewhere}\n")
    assert mpbroker("topic", "list", "-X", setting, "-F", path).out == b"one\nt\n"


def test_lines_go_out_while_the_input_stays_open(fake_broker):
    # As `tail -f app.log | mpbroker produce` needs it.
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "produce", "-t", "one"],
        stdin=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(b"first\n")
        process.stdin.flush()
        deadline = time.monotonic() + 90
        while not fake_broker.logs["one", 0] and time.monotonic() < deadline:
            os.sched_yield()
        assert pairs(fake_broker) == [(None, b"first")]
        process.stdin.write(b"second\n")
        process.stdin.close()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert [value for _, value in pairs(fake_broker)] == [b"first", b"second"]


def test_sigterm_ends_the_lines_that_were_read(fake_broker):
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "produce", "-t", "one", "--format", "json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"first\nsecond\nhal")
        process.stdin.flush()
        wait_until(lambda: fake_broker.logs["one", 0])
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.read()) == {"topic": "one", "records": 2}
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert [value for _, value in pairs(fake_broker)] == [b"first", b"second"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-t", "nope"], ExitCode.NOT_FOUND),
        (["-t", "one", "-p", "1"], ExitCode.NOT_FOUND),
        (["-t", "one", "-p", "-2"], ExitCode.NOT_FOUND),
        ([], ExitCode.USAGE),
        (["-t", "one", "-l"], ExitCode.USAGE),
        (["-t", "one", "-z", "rar"], ExitCode.USAGE),
        (["-t", "one", "-D", ""], ExitCode.USAGE),
        (["-t", "one", "-D", "\\q"], ExitCode.USAGE),
        (["-t", "one", "-H", "=x"], ExitCode.USAGE),
        (["-t", "one", "missing-file"], ExitCode.USAGE),
        (["-t", "one", "-b", "x:y"], ExitCode.USAGE),
        (["-t", "one", "-X", "securty.protocol=SSL"], ExitCode.USAGE),
        (["-t", "one", "-X", "retries=many"], ExitCode.USAGE),
        (["-t", "one", "-b", "nowhere.invalid:1"], ExitCode.UNAVAILABLE),
    ],
)
def test_exit_codes_of_produce(fake_broker, mpbroker, arguments, code):
    result = mpbroker("produce", *arguments, stdin=b"a\n")
    assert result.code == code
    assert result.err
    assert not fake_broker.logs["one", 0]


# -- consume ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_values_come_out_as_they_went_in(fake_broker, mpbroker, codec):
    fill(fake_broker, (0, b"k", ANY_BYTES), (0, None, None), (0, b"", b""), codec=codec)
    result = mpbroker("consume", "-t", "one", "-e")
    assert result.code == 0
    assert result.out == ANY_BYTES + b"\n\n\n"


def test_keys_offsets_nulls_and_delimiters(fake_broker, mpbroker):
    fill(fake_broker, (0, b"k", b"v"), (0, None, None))
    consume = ["consume", "-t", "one", "-e", "-K", ":", "-D", ";"]
    assert mpbroker(*consume).out == b"k:v;:;"
    assert mpbroker(*consume, "-O", "-Z").out == b"0:k:v;1:NULL:NULL;"


def test_the_format_knows_kcats_letters(fake_broker, mpbroker):
    fill(fake_broker, (5, b"k", b"\xff", ("h", b"1"), ("g", None)), (6, None, None))
    result = mpbroker(
        *["consume", "-t", "one", "-e", "-Z"],
        *["-f", "%t %p %o %T %k %K %s %S %h%% %%%o\\x41\\n"],
    )
    assert result.out == (
        b"one 0 0 5 k 1 \xff 1 h=1,g=NULL% %0A\none 0 1 6 NULL -1 NULL -1 % %1A\n"
    )


def test_the_binary_length_is_big_endian(fake_broker, mpbroker):
    fill(fake_broker, (0, None, b"abc"), (0, None, None))
    result = mpbroker("consume", "-t", "one", "-e", "-f", "%R%s")
    assert result.out == b"\0\0\0\3abc\xff\xff\xff\xff"


def test_json_is_kcats_envelope_with_base64_for_what_is_not_utf_8(
    fake_broker, mpbroker
):
    fill(fake_broker, (5, "é".encode(), b"\xff", ("h", b"1"), ("g", b"\xfe")))
    fill(fake_broker, (6, None, b'"'))
    result = mpbroker("consume", "-t", "one", "-e", "-J")
    first, second = map(json.loads, result.out.splitlines())
    assert first == {
        "topic": "one",
        "partition": 0,
        "offset": 0,
        "tstype": "create",
        "ts": 5,
        "broker": 7,
        "headers": ["h", "1", "g", {"base64": "/g=="}],
        "key": "é",
        "payload": {"base64": "/w=="},
    }
    assert (second["key"], second["payload"], second["headers"]) == (None, '"', [])


def offsets(mpbroker, *arguments):
    result = mpbroker("consume", "-t", "one", "-f", "%o ", *arguments)
    return [int(text) for text in result.out.split()]


@pytest.fixture
def ten_records(fake_broker):
    """Offsets 0-9 in two batches of 5, with timestamps 1000-1009."""
    for start in (0, 5):
        fill(fake_broker, *((1000 + start + n, None, b"x") for n in range(5)))
    return fake_broker


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-e"], range(10)),
        (["-e", "-o", "beginning"], range(10)),
        (["-e", "-o", "3"], range(3, 10)),
        (["-e", "-o", "-4"], range(6, 10)),
        (["-e", "-o", "-99"], range(10)),
        (["-c", "4"], range(4)),
        (["-o", "8", "-c", "2"], range(8, 10)),
        (["-e", "-o", "s@1005"], range(5, 10)),
        (["-e", "-o", "s@1970-01-01T00:00:01.005"], range(5, 10)),
        (["-e", "-o", "s@1970-01-01T01:00:01.005+01:00"], range(5, 10)),
        (["-o", "e@1970-01-01T00:00:01.005Z"], range(5)),
        (["-o", "e@1005"], range(5)),
        (["-o", "s@1000", "-o", "e@1005"], range(5)),
        (["-o", "e@99999"], range(10)),
    ],
)
@pytest.mark.usefixtures("ten_records")
def test_offsets_say_where_to_start_and_stop(mpbroker, arguments, expected):
    assert offsets(mpbroker, *arguments) == list(expected)


@pytest.mark.parametrize(
    "arguments", [["-e", "-o", "end"], ["-e", "-o", "s@99999"], ["-o", "e@1000"]]
)
@pytest.mark.usefixtures("ten_records")
def test_nothing_to_write_is_exit_code_10(mpbroker, arguments):
    result = mpbroker("consume", "-t", "one", *arguments)
    assert (result.code, result.out) == (ExitCode.NOT_FOUND, b"")
    assert (
        result.err == "mpbroker: no record in one between the offsets that -o means\n"
    )
    quiet = mpbroker("consume", "-q", "-t", "one", *arguments)
    assert (quiet.code, quiet.out + quiet.err.encode()) == (ExitCode.NOT_FOUND, b"")


@pytest.mark.usefixtures("ten_records")
def test_an_offset_that_does_not_exist_is_named_with_what_does(mpbroker):
    result = mpbroker("consume", "-t", "one", "-o", "50", "-c", "1")
    assert result.code == ExitCode.NOT_FOUND
    assert result.err == "mpbroker: one-0 has no offset 50: the partition has 0..10\n"


def test_records_deleted_while_reading_are_skipped_with_a_warning(
    ten_records, mpbroker
):
    def delete_the_rest(request):
        ten_records.logs["one", 0].pop(0)
        ten_records.starts["one", 0] = 7

    first = ten_records.logs["one", 0]
    ten_records.answer_with(ApiKey.FETCH, lambda request: None, delete_the_rest)
    # Only the first batch fits the first answer.
    original = ten_records._partition
    ten_records._partition = lambda topic, entry: original(
        topic,
        entry.__class__(
            partition=entry.partition,
            fetch_offset=entry.fetch_offset,
            partition_max_bytes=len(first[0]),
        ),
    )
    result = mpbroker("consume", "-t", "one", "-e", "-f", "%o ")
    assert result.out == b"0 1 2 3 4 7 8 9 "
    assert "one-0: records 5..6 were deleted before they were read" in result.err


def test_what_a_new_leader_lacks_is_said_and_its_own_records_are_read(
    fake_broker, mpbroker
):
    def write(*numbers):
        for number in numbers:
            fill(fake_broker, (1000 + number, None, b"%d" % number))

    def elect(request):
        fake_broker.elect("one", 0, end=2)
        write(*range(12, 20))

    write(*range(10))
    fake_broker.answer_with(ApiKey.FETCH, lambda request: None, elect)
    # Only four fit an answer.
    size = len(fake_broker.logs["one", 0][0])
    original = fake_broker._partition

    def answer(topic, entry):
        entry.partition_max_bytes = 4 * size
        return original(topic, entry)

    fake_broker._partition = answer
    result = mpbroker("consume", "-t", "one", "-e", "-f", "%s ")
    assert result.code == ExitCode.OK
    assert result.out == b"0 1 2 3 12 13 14 15 16 17 18 19 "
    assert "one-0: a new leader has other records from offset 2 on" in result.err


def test_a_lost_connection_is_made_again(ten_records, mpbroker):
    ten_records.answer_with(ApiKey.FETCH, lambda request: CLOSE)
    result = mpbroker("consume", "-t", "one", "-e", "-f", "%o ")
    assert result.out == b"0 1 2 3 4 5 6 7 8 9 "
    assert "closed by the broker; trying again" in result.err


def test_all_partitions_or_those_named(fake_broker, mpbroker):
    for partition in range(3):
        fill(fake_broker, (0, None, b"%d" % partition), topic="t", partition=partition)
    assert sorted(mpbroker("consume", "-t", "t", "-e").out.split()) == [
        b"0",
        b"1",
        b"2",
    ]
    result = mpbroker("consume", "-t", "t", "-e", "-p", 1, "-p", 2)
    assert sorted(result.out.split()) == [b"1", b"2"]


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_reader_that_has_seen_enough_ends_it_quietly(fake_broker, count):
    # Less than a pipe holds, and more: between two writes, and in the middle of one.
    fill(fake_broker, *((0, None, b"x" * 1000) for _ in range(count)))
    process = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "consume", "-t", "one"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x" * 1000 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-t", "nope", "-e"], ExitCode.NOT_FOUND),
        (["-t", "one", "-p", "9", "-e"], ExitCode.NOT_FOUND),
        (["-t", "one", "-o", "stored"], ExitCode.USAGE),
        (["-t", "one", "-o", "1", "-o", "2"], ExitCode.USAGE),
        (["-t", "one", "-o", "s@soon"], ExitCode.USAGE),
        (["-t", "one", "-o", "s@1700000000"], ExitCode.USAGE),
        (["-t", "one", "-o", "e@2026-13-01"], ExitCode.USAGE),
        (["-t", "one", "-f", "%y"], ExitCode.USAGE),
        (["-t", "one", "-f", "50%"], ExitCode.USAGE),
        (["-t", "one", "-J", "-f", "%s"], ExitCode.USAGE),
        (["-t", "one", "-O"], ExitCode.USAGE),
        (["-t", "one", "-b", "nowhere.invalid:1"], ExitCode.UNAVAILABLE),
    ],
)
@pytest.mark.usefixtures("fake_broker")
def test_exit_codes_of_consume(mpbroker, arguments, code):
    result = mpbroker("consume", *arguments)
    assert result.code == code
    assert result.err
    assert result.out == b""


@given(st.text(max_size=12))
def test_any_offset_text_is_understood_or_refused_with_a_reason(text):
    try:
        wanted = parse_offsets([text])
    except click.BadParameter as error:
        assert repr(text) in str(error) or "stored" in str(error)
    else:
        assert isinstance(wanted, OffsetRange)


# -- the last records ------------------------------------------------------------------


def test_the_last_records_are_counted_and_not_their_offsets(bootstrap, topic_name):
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    program = [sys.executable, "-m", "mpbroker"]
    with Producer(
        bootstrap_servers=bootstrap, transactional_id=f"id-{topic_name}"
    ) as producer:
        producer.init_transactions()
        for number in range(40):
            producer.begin_transaction()
            producer.send(topic_name, str(number).encode(), partition=0)
            producer.flush()
            if number < 4:
                producer.commit_transaction()
            else:  # two offsets without a record
                producer.abort_transaction()
    consume = [*program, "consume", "-b", bootstrap, "-t", topic_name, "-e", "-q"]
    for count, expected in ((1, "3"), (3, "1 2 3"), (9, "0 1 2 3")):
        done = run([*consume, "-D", " ", "-o", f"-{count}"])
        assert done.stdout.split() == expected.split()
    reset = [*program, "group", "reset-offsets", f"g-{topic_name}", "-b", bootstrap]
    reset += ["-t", topic_name, "-o", "-36", "--format", "json"]
    (row,) = json.loads(run(reset).stdout)["partitions"]
    # All are read: 36 records and their markers, up to offset 80.
    assert row["after"] == 8


# -- a pipe copies a topic -------------------------------------------------------------


def test_a_pipe_of_json_copies_all_of_a_record(fake_broker, mpbroker):
    fill(
        fake_broker,
        (1000, b"k", b"text"),
        (1001, None, None),
        (1002, b"", b""),
        (1003, ANY_BYTES, ANY_BYTES),
        (1004, b"k", b"line\nend", ("h", b"1"), ("h", None)),
        (1005, b"k", b'{"base64": "AA=="}', ("\u00e9", ANY_BYTES)),
    )
    copied = mpbroker("consume", "-t", "one", "-e", "-J").out
    assert mpbroker("produce", "-t", "t", "-p", "0", "-J", stdin=copied).code == 0

    def parts(topic):
        return [
            (each.timestamp, each.key, each.value, list(each.headers))
            for each in records(fake_broker, topic)
        ]

    assert parts("t") == parts("one")
    assert len(parts("t")) == 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "no JSON"),
        (b"[]", '"payload"'),
        (b'{"key": "k"}', '"payload"'),
        (b'{"payload": 1}', '"payload" is no text'),
        (b'{"payload": {"base64": "?"}}', "2 of the input"),
        (b'{"payload": "x", "headers": ["h"]}', '"headers"'),
        (b'{"payload": "x", "headers": [null, "v"]}', "no name"),
        (b'{"payload": "x", "ts": "noon"}', '"ts"'),
        (b'{"payload": "x", "ts": 9223372036854775808}', "timestamp_ms"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_costs_no_other(
    fake_broker, mpbroker, line, words
):
    lines = [b'{"payload": "a"}', line, b'{"payload": "b"}']
    done = mpbroker("produce", "-t", "one", "-J", stdin=b"\n".join(lines))
    assert done.code == ExitCode.ERROR
    first, last = done.err.splitlines()
    assert "1 record (number 2 of the input) not written" in first and words in first
    assert last == "mpbroker: one: 1 of 3 records not written"
    assert pairs(fake_broker) == [(None, b"a"), (None, b"b")]


def test_a_file_that_cannot_be_read_costs_none_of_those_before(
    fake_broker, mpbroker, tmp_path
):
    (tmp_path / "first").write_bytes(b"a")
    command = ["produce", "-t", "one", tmp_path / "first", tmp_path]
    done = mpbroker(*command)
    assert done.code == ExitCode.ERROR
    assert f"{tmp_path}: is a directory" in done.err
    assert pairs(fake_broker) == [(None, b"a")]


def test_a_line_above_max_request_size_costs_no_other_line(fake_broker, mpbroker):
    """The client refuses it by itself."""
    stdin = b"\n".join([b"a", b"x" * 3000, b"b"])
    settings = ["-X", "max.request.size=2000"]
    done = mpbroker("produce", "-t", "one", *settings, stdin=stdin)
    first, last = done.err.splitlines()
    assert "number 2 of the input" in first and "max.request.size=2000" in first
    assert last == "mpbroker: one: 1 of 3 records not written"
    assert pairs(fake_broker) == [(None, b"a"), (None, b"b")]
