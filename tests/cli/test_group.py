"""`mpbroker group` and `consume -G`, against a broker of our own."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.producer import Producer
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S


@pytest.fixture(scope="module")
def group_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {"group.initial.rebalance.delay.ms": 0, "offsets.topic.num.partitions": 3}
    with Broker(tmp_path_factory.mktemp("groups") / "data", config) as broker:
        yield broker


@pytest.fixture(autouse=True)
def use_our_broker(group_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", group_broker.bootstrap)


@pytest.fixture
def topic(mpbroker, topic_name):
    assert mpbroker("topic", "create", topic_name, "-p", 2).code == 0
    for partition, text in enumerate((b"a\nb\nc\n", b"d\n")):
        mpbroker("produce", "-t", topic_name, "-p", partition, stdin=text)
    yield topic_name
    assert mpbroker("topic", "delete", topic_name).code == 0


@pytest.fixture
def group(mpbroker, topic):
    yield f"group-of-{topic}"
    assert mpbroker("group", "delete", "--if-exists", f"group-of-{topic}").code == 0


def offsets(mpbroker, group):
    result = mpbroker("group", "describe", group, "--format", "json")
    assert result.code == 0
    (found,) = json.loads(result.out)
    return [
        (row["partition"], row["offset"], row["lag"]) for row in found["partitions"]
    ]


def test_a_group_reads_on_where_it_has_got_to(mpbroker, topic, group):
    first = mpbroker("consume", "-G", group, topic, "-e")
    assert (first.code, first.err) == (0, "")
    assert sorted(first.out.split()) == [b"a", b"b", b"c", b"d"]
    again = mpbroker("consume", "-G", group, topic, "-e")
    assert again.code == ExitCode.NOT_FOUND
    behind = f"no record in {topic} behind the positions of group '{group}'"
    assert again.err == f"mpbroker: {behind}\n"
    mpbroker("produce", "-t", topic, "-p", 1, stdin=b"e\n")
    assert offsets(mpbroker, group) == [(0, 3, 0), (1, 1, 1)]
    again = mpbroker("consume", "-G", group, "-t", topic, "-e", "-f", "%p/%o %s\n")
    assert again.out == b"1/1 e\n"


def test_a_position_beyond_the_end_is_no_lag(mpbroker, topic, group, group_broker):
    with Consumer(bootstrap_servers=group_broker.bootstrap, group_id=group) as consumer:
        consumer.assign([(topic, 0)])
        consumer.commit({(topic, 0): 100})
    assert offsets(mpbroker, group) == [(0, 100, 0)]


def test_a_group_ends_at_the_ends_of_its_beginning_while_others_write(
    mpbroker, topic, group, group_broker
):
    """A record for each poll: there was always one more, and it never ended."""
    with Producer(bootstrap_servers=group_broker.bootstrap) as producer:
        polled = Consumer.poll

        def poll_behind_a_record(self, *arguments):
            producer.send(topic, b"more", partition=0).result(LONGEST_S)
            return polled(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Consumer, "poll", poll_behind_a_record)
            result = mpbroker("consume", "-G", group, topic, "-e")
    assert result.code == 0
    assert {b"a", b"b", b"c", b"d"} <= set(result.out.split())


def test_a_member_leaves_its_group_at_sigterm(mpbroker, topic, group):
    reader = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", "consume", "-G", group, topic],
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout is not None
        read = sorted(reader.stdout.readline() for _ in range(4))
        assert read == [b"a\n", b"b\n", b"c\n", b"d\n"]
        reader.send_signal(signal.SIGTERM)
        assert reader.wait(LONGEST_S) == ExitCode.OK
    finally:
        reader.kill()
        reader.communicate()
    (found,) = json.loads(mpbroker("group", "describe", group, "--format", "json").out)
    assert found["state"] == "Empty"
    assert offsets(mpbroker, group) == [(0, 3, 0), (1, 1, 0)]


def test_a_group_stops_after_a_count_and_commits_no_more(mpbroker, topic, group):
    taken = mpbroker("consume", "-G", group, topic, "-c", 3, "-J").out.splitlines()
    assert len(taken) == 3
    assert {json.loads(line)["tstype"] for line in taken} == {"create"}
    rest = mpbroker("consume", "-G", group, topic, "-e", "-J").out.splitlines()
    payloads = [json.loads(line)["payload"] for line in (*taken, *rest)]
    assert sorted(payloads) == ["a", "b", "c", "d"]


def test_a_new_group_can_begin_at_the_end(mpbroker, topic, group):
    result = mpbroker("consume", "-G", group, topic, "-o", "end", "-e")
    assert (result.code, result.out) == (ExitCode.NOT_FOUND, b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["t"], "give -t t, or -G with a group"),
        ([], "no topic is named"),
        (["-G", "g", "t", "-p", "0"], "-G and -p exclude each other"),
        (["-G", "g", "t", "-o", "5"], "group reset-offsets"),
    ],
)
def test_what_a_group_cannot_do_is_said(mpbroker, arguments, words):
    result = mpbroker("consume", *arguments)
    assert result.code == ExitCode.USAGE
    assert words in " ".join(result.err.split())


def test_unknown_groups_and_topics_are_exit_code_10(mpbroker, topic):
    assert mpbroker("consume", "-G", "g", "nowhere").code == ExitCode.NOT_FOUND
    for words in (["describe"], ["delete"], ["reset-offsets", "--all-topics", "-o", 0]):
        result = mpbroker("group", words[0], "no-such", *words[1:])
        assert result.code == ExitCode.NOT_FOUND, result.err
    to_nowhere = ["reset-offsets", "g", "-o", "0", "-t"]
    assert mpbroker("group", *to_nowhere, "nowhere").code == ExitCode.NOT_FOUND
    assert mpbroker("group", *to_nowhere, f"{topic}:7").code == ExitCode.NOT_FOUND
    assert mpbroker("group", *to_nowhere, f"{topic}:x").code == ExitCode.USAGE


def test_a_living_group_is_listed_described_and_left_alone(
    mpbroker, group_broker, topic, group
):
    stop = threading.Event()
    with Consumer(
        bootstrap_servers=group_broker.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:
        consumer.subscribe([topic])
        assert consumer.poll(20_000)
        consumer.commit({(topic, 0): 2})

        def stay() -> None:
            while not stop.wait(0.05):
                consumer.poll(0)

        thread = threading.Thread(target=stay)
        thread.start()
        try:
            assert group.encode() in mpbroker("group", "list").out.split()
            listed = json.loads(
                mpbroker(
                    *["group", "list", "--state", "stable", "--type", "classic"],
                    *["--format", "json"],
                ).out
            )
            assert {"group": group, "state": "Stable"}.items() <= {
                key: value
                for row in listed
                if row["group"] == group
                for key, value in row.items()
            }.items()
            text = mpbroker("group", "describe", group).out.decode().splitlines()
            assert text[0] == f"{group}: classic, Stable, range, 1 member"
            assert text[1].split()[:5] == [
                *("TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")
            ]
            assert text[2].split()[:5] == [topic, "0", "2", "3", "1"]
            host, client_id = text[2].split()[-2:]
            assert host == "/127.0.0.1"
            assert re.fullmatch(rf"consumer-{re.escape(group)}-\d+", client_id)
            assert text[3].split()[:5] == [topic, "1", "-", "1", "-"]
            assert mpbroker("group", "delete", group).code == ExitCode.ERROR
            moved = mpbroker(
                *["group", "reset-offsets", group, "--all-topics", "-o", "end"],
                "--execute",
            )
            assert moved.code == ExitCode.ERROR
            assert "has 1 member and is Stable" in moved.err
        finally:
            stop.set()
            thread.join()
    assert offsets(mpbroker, group) == [(0, 2, 1)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--all-topics", "-o", "beginning"], [(0, 0, 3), (1, 0, 1)]),
        (["--all-topics", "-o", "end"], [(0, 3, 0), (1, 1, 0)]),
        (["--all-topics", "-o", "-2"], [(0, 1, 2), (1, 0, 1)]),
        (["--all-topics", "-o", "99"], [(0, 3, 0), (1, 1, 0)]),
        (["--all-topics", "-o", "s@2286-11-20T17:46:39Z"], [(0, 3, 0), (1, 1, 0)]),
        (["-t", "{topic}:0", "-o", "2"], [(0, 2, 1), (1, 1, 0)]),
        (["-t", "{topic}", "--shift-by", "-2"], [(0, 1, 2), (1, 0, 1)]),
    ],
)
def test_positions_are_moved_when_told_to(mpbroker, topic, group, arguments, expected):
    mpbroker("consume", "-G", group, topic, "-e")
    before = [(0, 3, 0), (1, 1, 0)]
    arguments = [argument.format(topic=topic) for argument in arguments]
    shown = mpbroker("group", "reset-offsets", group, *arguments)
    assert (shown.code, shown.err) == (0, "")
    assert b"nothing is stored yet" in shown.out
    assert offsets(mpbroker, group) == before
    done = mpbroker(
        *["group", "reset-offsets", group, *arguments, "--execute"],
        *["--format", "json"],
    )
    assert json.loads(done.out)["executed"] is True
    assert offsets(mpbroker, group) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "0"],
        ["--all-topics"],
        ["--all-topics", "-t", "t", "-o", "0"],
        ["--all-topics", "-o", "0", "--shift-by", "1"],
        ["--all-topics", "-o", "e@5"],
    ],
)
def test_a_reset_says_what_and_whereto_once(mpbroker, arguments):
    assert mpbroker("group", "reset-offsets", "g", *arguments).code == ExitCode.USAGE


def test_a_deleted_group_is_gone(mpbroker, topic, group):
    mpbroker("consume", "-G", group, topic, "-e")
    result = mpbroker("group", "delete", group)
    assert (result.code, result.out) == (0, f"group {group} deleted\n".encode())
    assert group.encode() not in mpbroker("group", "list").out.split()
    result = mpbroker("group", "delete", "--if-exists", group, "--format", "json")
    assert json.loads(result.out) == [{"group": group, "deleted": False}]
    result = mpbroker("group", "delete", "--if-exists", group)
    assert (result.code, result.out) == (0, f"group {group} does not exist\n".encode())


def test_a_share_group_is_listed_described_reset_and_deleted(
    mpbroker, group_broker, topic
):
    group = f"queue-of-{topic}"
    with wire.Connection(address_of(group_broker)) as connection:

        def beat(epoch):
            request = ShareGroupHeartbeatRequest(
                group_id=group,
                member_id="one",
                member_epoch=epoch,
                subscribed_topic_names=[topic],
            )
            payload = connection.ask(wire.request((76, 1), request.encode(1)))
            return ShareGroupHeartbeatResponse.decode(1, payload[5:])

        wait_until(lambda: beat(0).error_code == 0)
        listed = mpbroker("group", "list", "--type", "share", "--format", "json")
        assert json.loads(listed.out) == [
            {
                "group": group,
                "type": "share",
                "state": "Stable",
                "protocol_type": "share",
            }
        ]
        described = mpbroker("group", "describe", group, "--format", "json")
        (found,) = json.loads(described.out)
        (member,) = found["members"]
        assert (found["type"], found["assignor"], member["member_id"]) == (
            "share",
            "simple",
            "one",
        )
        assert [row["partition"] for row in member["partitions"]] == [0, 1]
        reset = ("group", "reset-offsets", group, "-t", topic, "-o", "beginning")
        busy = mpbroker(*reset, "--execute")
        assert (busy.code, "has 1 member and" in busy.err) == (1, True)
        assert beat(-1).error_code == 0
    done = mpbroker(*reset, "--execute")
    assert (done.code, done.out.endswith(b"\nthe new offsets are stored\n")) == (
        0,
        True,
    )
    assert offsets(mpbroker, group) == [(0, 0, 3), (1, 0, 1)]
    shift = ("group", "reset-offsets", group, "--all-topics", "--shift-by", "1")
    assert mpbroker(*shift, "--execute").code == 0
    assert offsets(mpbroker, group) == [(0, 1, 2), (1, 1, 0)]
    table = mpbroker("group", "describe", group).out
    assert b"START-OFFSET" in table
    assert b"CONSUMER-ID" not in table
    assert mpbroker("group", "delete", group).code == 0
    assert mpbroker("group", "describe", group).code == ExitCode.NOT_FOUND
