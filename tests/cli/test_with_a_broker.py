"""The commands against our own broker, as somebody new to it would use them."""

import json

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.support.broker import Broker


@pytest.fixture(autouse=True)
def use_our_broker(own_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", own_broker.bootstrap)


@pytest.fixture
def topic(mpbroker, topic_name):
    assert mpbroker("topic", "create", topic_name, "-p", 3).code == 0
    yield topic_name
    assert mpbroker("topic", "delete", topic_name).code == 0


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_was_produced_is_consumed(mpbroker, topic, codec):
    lines = [b"k%d:v%d" % (n % 7, n) for n in range(5000)]
    stdin = b"\n".join(lines) + b"\n"
    produced = mpbroker("produce", "-t", topic, "-K", ":", "-z", codec, stdin=stdin)
    assert (produced.code, produced.err) == (0, "")
    consumed = mpbroker("consume", "-t", topic, "-K", ":", "-e")
    assert sorted(consumed.out.splitlines()) == sorted(lines)
    # Of one key, in the order given.
    of_k3 = [line for line in consumed.out.splitlines() if line.startswith(b"k3:")]
    assert of_k3 == [line for line in lines if line.startswith(b"k3:")]


def test_what_the_broker_wrote_is_dumped(mpbroker, topic, own_broker):
    mpbroker("produce", "-t", topic, "-p", 1, "-z", "lz4", stdin=b"a\nb\n")
    directory = own_broker.data_dir / f"{topic}-1"
    result = mpbroker("dump", "--format", "json", "--print-data-log", directory)
    assert result.code == 0
    (batch,) = map(json.loads, result.out.splitlines())
    assert (batch["count"], batch["compresscodec"]) == (2, "lz4")
    assert [record["payload"] for record in batch["records"]] == ["a", "b"]


def test_a_topics_id_is_spelt_as_in_its_files_and_by_kafkas_tools(
    mpbroker, topic, own_broker
):
    mpbroker("produce", "-t", topic, "-p", 1, stdin=b"a\n")
    path = own_broker.data_dir / f"{topic}-1" / "partition.metadata"
    topic_id = path.read_text().split("topic_id: ")[1].strip()
    for command in (["list"], ["describe"]):
        told = mpbroker("topic", *command, topic, "--format", "json").out
        assert [entry["topic_id"] for entry in json.loads(told)] == [topic_id]
    assert (
        f"id          {topic_id}\n" in mpbroker("topic", "describe", topic).out.decode()
    )


def test_a_line_that_is_too_large_costs_no_other_line(mpbroker, topic):
    """Of 400,000 lines 4,441 to 30,682 were stored, and one was said to be missing."""
    lines = [b"%d" % number for number in range(20_000)]
    lines[1000] = b"x" * 2_000_000
    result = mpbroker("produce", "-t", topic, stdin=b"\n".join(lines))
    assert result.code == ExitCode.ERROR
    first, last = result.err.splitlines()
    assert f"{topic}: 1 record (number 1001 of the input) not written" in first
    assert last == f"mpbroker: {topic}: 1 of 20000 records not written"
    read = mpbroker("consume", "-t", topic, "-e").out.split()
    assert sorted(read) == sorted(lines[:1000] + lines[1001:])


def test_batches_fit_the_topics_own_limit(mpbroker, topic):
    mpbroker("topic", "alter", topic, "--config", "max.message.bytes=2000")
    result = mpbroker("produce", "-t", topic, stdin=b"0123456789\n" * 2000)
    assert (result.code, result.err) == (0, "")
    result = mpbroker("produce", "-t", topic, stdin=b"x" * 5000)
    assert result.code == ExitCode.ERROR
    assert (
        f"{topic}: 1 record (number 1 of the input) not written" in result.err
        and "MESSAGE_TOO_LARGE" in result.err
    )
    (described,) = json.loads(
        mpbroker("topic", "describe", topic, "--format", "json").out
    )
    assert described["configs"]["max.message.bytes"]["value"] == "2000"
    ends = [partition["end_offset"] for partition in described["partitions"]]
    assert sum(ends) == 2000 and min(ends) > 0


def test_an_offset_beyond_the_end_is_named_with_the_ends(mpbroker, topic):
    assert mpbroker("produce", "-t", topic, "-p", 1, stdin=b"a\nb\n").code == 0
    result = mpbroker("consume", "-t", topic, "-o", "99999999", "-e")
    assert result.code == ExitCode.NOT_FOUND
    assert "no record at offset 99999999 or behind it" in result.err
    assert f"{topic}-1 ends at 2" in result.err
    refused = mpbroker("consume", "-t", topic, "-o", "xyz", "-e")
    assert refused.code == ExitCode.USAGE
    assert "Invalid value for '-o' / '--offset': 'xyz' is none of" in refused.err


def test_unknown_topics_are_exit_code_10(mpbroker):
    for arguments in (
        ["topic", "describe", "nope"],
        ["topic", "delete", "nope"],
        ["topic", "alter", "nope", "--config", "retention.ms=1"],
        ["consume", "-t", "nope", "-e"],
    ):
        assert mpbroker(*arguments).code == ExitCode.NOT_FOUND, arguments
    assert mpbroker("topic", "list", "nope").code == ExitCode.NOT_FOUND


def test_acls_of_a_broker_without_an_authorizer_say_what_they_need(mpbroker):
    for words in (["list"], ["add", "--allow", "User:a", "-o", "read", "-t", "t"]):
        result = mpbroker("acl", *words)
        assert result.code == ExitCode.ERROR
        assert result.err.endswith("set authorizer.class.name of the broker\n")


def test_settings_the_broker_refuses_are_errors_in_its_words(mpbroker, topic):
    for arguments in (
        ["topic", "create", "x", "--config", "retention.ms=soon"],
        ["topic", "create", "x", "--replication-factor", "3"],
        ["topic", "create", "a b"],
        ["topic", "alter", topic, "--config", "no.such.setting=1"],
        ["topic", "alter", topic, "--partitions", "2"],
    ):
        result = mpbroker(*arguments)
        assert result.code == ExitCode.ERROR, arguments
        assert result.err.count("\n") == 1, arguments


def test_a_share_group_delivers_each_record_until_it_is_accepted(mpbroker, topic):
    group = f"queue-of-{topic}"
    lines = [b"%d" % number for number in range(20)]
    mpbroker("produce", "-t", topic, stdin=b"\n".join(lines) + b"\n")
    consume = ("consume", "--share", group, "-t", topic)
    shown = mpbroker(*consume, "-o", "beginning", "-c", 5, "--ack", "release")
    assert (shown.code, shown.err) == (0, "")
    assert len(shown.out.splitlines()) == 5
    # What was released, or fetched and not written, comes again.
    taken = mpbroker(*consume, "-c", 5)
    assert len(taken.out.splitlines()) == 5
    dropped = mpbroker(*consume, "-c", 5, "--ack", "reject")
    rest = mpbroker(*consume, "-e", "-f", "%s\\n")
    done = b"".join(each.out for each in (taken, dropped, rest)).splitlines()
    assert sorted(done, key=int) == lines
    assert mpbroker(*consume, "-e").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-G", "g"], "-G and --share"),
        (["-p", "0"], "--share and -p"),
        (["-o", "7"], "beginning or end"),
        (["-e", "--ack", "release"], "never ends"),
        (["--isolation", "read_committed"], "share.isolation.level"),
    ],
)
def test_options_that_a_share_group_cannot_follow_are_refused(
    mpbroker, options, reason
):
    result = mpbroker("consume", "--share", "q", "-t", "t", *options)
    assert result.code == ExitCode.USAGE
    assert reason in result.err


def test_how_to_acknowledge_is_for_share_groups_only(mpbroker):
    result = mpbroker("consume", "-t", "t", "--ack", "reject")
    assert result.code == ExitCode.USAGE
    assert "--ack needs --share" in result.err
