"""Apache Kafka's own Java client and tools, from the jars that Maven fetched."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.compat.adapters import ADAPTERS
from tests.compat.adapters.adapter import CODECS
from tests.compat.members import Group
from tests.compat.records import T0, some_records
from tests.conftest import OtherBroker
from tests.support.apache_kafka import java_command
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools
from tests.support.patience import LONGEST_S

MakeTopic = Callable[..., str]
Tool = Callable[..., str]

TOOLS = "org.apache.kafka.tools"

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
    # Each run of a tool takes a second, and ten where cores are busy.
]


@pytest.fixture
def tool(bootstrap: str) -> Tool:
    """Run a tool against the broker: tool(main_class, *arguments) -> what it printed.

    Fails the test if the tool did, or complained on its standard error.
    """

    def run(main_class: str, *arguments: str, stdin: str = "") -> str:
        return run_java(
            main_class, "--bootstrap-server", bootstrap, *arguments, stdin=stdin
        )

    return run


def run_java(main_class: str, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        java_command(main_class, *arguments),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",  # the console prints bytes as they are
        timeout=2 * LONGEST_S,
        check=False,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    # The console producer exits with 0 whatever happened to the records.
    assert not re.search(r"(?m)ERROR|^Exception|^\[.*WARN.*Got error", done.stderr), (
        said
    )
    return done.stdout


def test_topics_are_created_listed_described_grown_and_deleted(
    tool: Tool, topic_name: str
) -> None:
    topics = f"{TOOLS}.TopicCommand"
    this = ("--topic", topic_name)
    config = ("--config", "retention.ms=60000")
    tool(topics, "--create", *this, "--partitions", "3", *config)
    assert topic_name in tool(topics, "--list").split()
    described = tool(topics, "--describe", *this)
    assert "PartitionCount: 3" in described
    assert "ReplicationFactor: 1" in described
    assert "retention.ms=60000" in described
    tool(topics, "--alter", *this, "--partitions", "5")
    assert "PartitionCount: 5" in tool(topics, "--describe", *this)
    tool(topics, "--delete", *this)
    assert topic_name not in tool(topics, "--list").split()


def test_the_console_reads_what_it_published(tool: Tool, make_topic: MakeTopic) -> None:
    topic = make_topic()
    lines = [f"h:{i}\tkey {i}\tvalue {i}" for i in range(10)]
    parse = (
        *("--reader-property", "parse.key=true"),
        *("--reader-property", "parse.headers=true"),
    )
    tool(
        f"{TOOLS}.ConsoleProducer",
        *("--topic", topic, *parse),
        stdin="\n".join(lines) + "\n",
    )
    shown = console_consumer(
        tool, topic, "4", 6, shown=("timestamp", "offset", "headers", "key")
    )
    assert [line.split("\t")[1:] for line in shown] == [
        [f"Offset:{i}", f"h:{i}", f"key {i}", f"value {i}"] for i in range(4, 10)
    ]


@pytest.mark.parametrize("producer", sorted(ADAPTERS))
def test_the_java_consumer_reads_every_codec_of_every_client(
    tool: Tool, bootstrap: str, make_topic: MakeTopic, producer: str
) -> None:
    topic = make_topic()
    with ADAPTERS[producer](bootstrap) as client:
        for codec in CODECS:
            client.produce(topic, some_records(20), codec=codec)
    shown = console_consumer(tool, topic, offset="earliest", count=100)
    assert [line.split("\t")[:2] for line in shown] == [
        [f"CreateTime:{T0 + i % 20}", f"Offset:{i}"] for i in range(100)
    ]


def console_consumer(
    tool: Tool,
    topic: str,
    offset: str,
    count: int,
    shown: Sequence[str] = ("timestamp", "offset"),
) -> list[str]:
    printed = tool(
        f"{TOOLS}.consumer.ConsoleConsumer",
        *("--topic", topic, "--partition", "0", "--offset", offset),
        *("--max-messages", str(count), "--timeout-ms", str(LONGEST_S * 1000)),
        *(
            part
            for name in shown
            for part in ("--formatter-property", f"print.{name}=true")
        ),
    )
    return printed.splitlines()


@pytest.mark.parametrize("codec", CODECS)
def test_the_java_producer_publishes_with_every_codec(
    bootstrap: str, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic(2)
    # Idempotent and acks=all, as is the Java client's default.
    printed = run_java(
        f"{TOOLS}.ProducerPerformance",
        *("--topic", topic, "--num-records", "5000", "--record-size", "200"),
        *("--throughput", "-1", "--producer-props", f"bootstrap.servers={bootstrap}"),
        f"compression.type={codec}",
    )
    # Behind what it says every five seconds.
    assert "\n5000 records sent" in f"\n{printed}"
    total = 0
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            ends = [client.offsets(topic, partition)[1] for partition in (0, 1)]
            assert sum(ends) == 5000
            total = ends[0]
            messages = client.consume(topic, 0, 0, total)
            assert [m.offset for m in messages] == list(range(total))
            assert all(len(m.value or b"") == 200 for m in messages)


def test_the_verifiable_producer_is_answered_with_offsets(
    tool: Tool, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    printed = tool(
        f"{TOOLS}.VerifiableProducer", "--topic", topic, "--max-messages", "50"
    )
    events = [json.loads(line) for line in printed.splitlines()]
    sent = [e for e in events if e["name"] == "producer_send_success"]
    assert [(e["value"], e["offset"]) for e in sent] == [(str(i), i) for i in range(50)]
    assert events[-1]["acked"] == 50


def test_offsets_are_listed_by_every_kind_of_time(
    tool: Tool, bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(20))
        client.produce(topic, some_records(1))  # an old time after the newest
        client.delete_records(topic, 0, 3)
    for time, offset in (
        ("earliest", 3),
        ("latest", 21),
        ("max-timestamp", 19),
        (str(T0 + 5), 5),
    ):
        printed = tool(f"{TOOLS}.GetOffsetShell", "--topic", topic, "--time", time)
        assert printed.strip() == f"{topic}:0:{offset}", time


def test_configurations_are_altered_and_described(
    tool: Tool, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    this = ("--entity-type", "topics", "--entity-name", topic)
    config = f"{TOOLS}.ConfigCommand"
    tool(config, *this, "--alter", "--add-config", "retention.ms=5000,segment.ms=700")
    described = tool(config, *this, "--describe")
    assert "retention.ms=5000" in described
    assert "DYNAMIC_TOPIC_CONFIG:segment.ms=700" in described
    tool(config, *this, "--alter", "--delete-config", "retention.ms")
    assert "retention.ms" not in tool(config, *this, "--describe")
    everything = tool(config, *this, "--describe", "--all")
    assert re.search(r"^\s*max.message.bytes=1048588", everything, re.MULTILINE)


def test_brokers_all_of_them_a_listener_and_groups_are_configured(tool: Tool) -> None:
    # Values that change nothing for others who use this broker.
    config = f"{TOOLS}.ConfigCommand"
    one = ("--entity-type", "brokers", "--entity-name", "1")
    every = ("--entity-type", "brokers", "--entity-default")
    group = ("--entity-type", "groups", "--entity-name", "nobody's")
    prefixed = "listener.name.plaintext.max.connections"
    tool(
        config,
        *("--alter", *one, "--add-config", f"background.threads=5,{prefixed}=99999"),
    )
    tool(config, "--alter", *every, "--add-config", "background.threads=6")
    tool(config, "--alter", *group, "--add-config", "consumer.session.timeout.ms=50000")
    described = tool(config, "--describe", *one)
    assert "background.threads=5" in described and f"{prefixed}=99999" in described
    assert "DYNAMIC_BROKER_CONFIG:background.threads=5" in described
    assert "DYNAMIC_DEFAULT_BROKER_CONFIG:background.threads=6" in described
    with pytest.raises(AssertionError, match="Cannot update these configs dynamically"):
        tool(config, "--alter", *one, "--add-config", "log.dirs=/elsewhere")


def test_records_are_deleted_by_the_tool(
    tool: Tool, bootstrap: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    plan = tmp_path / "delete.json"
    partition = {"topic": topic, "partition": 0, "offset": 7}
    plan.write_text(json.dumps({"version": 1, "partitions": [partition]}))
    with ADAPTERS["aiokafka"](bootstrap) as client:
        client.produce(topic, some_records(10))
        printed = tool(f"{TOOLS}.DeleteRecordsCommand", "--offset-json-file", str(plan))
        assert "low_watermark: 7" in printed
        assert client.offsets(topic, 0) == (7, 10)


def test_the_cluster_its_versions_and_its_log_directories_are_described(
    tool: Tool, bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with ADAPTERS["kafka-python"](bootstrap) as client:
        client.produce(topic, some_records(10))
    cluster = f"{TOOLS}.ClusterTool"  # takes its address after the subcommand only
    printed = run_java(cluster, "cluster-id", "--bootstrap-server", bootstrap)
    assert re.search(r"Cluster ID: [A-Za-z0-9_-]{22}\b", printed)
    versions = tool(f"{TOOLS}.BrokerApiVersionsCommand")
    assert "ERROR" not in versions
    assert re.search(r"Produce\(0\): 0 to \d+ \[usable: \d+\]", versions)
    directories = tool(f"{TOOLS}.LogDirsCommand", "--describe", "--topic-list", topic)
    report = json.loads(directories.splitlines()[-1])
    [broker] = report["brokers"]
    [partition] = [p for d in broker["logDirs"] for p in d["partitions"]]
    assert partition["partition"] == f"{topic}-0"
    assert partition["size"] > 0


def test_apache_kafkas_own_check_of_a_clients_broker_passes(
    tool: Tool, broker: Broker | OtherBroker, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    try:
        tool(
            f"{TOOLS}.ClientCompatibilityTest",
            *("--topic", topic, "--num-cluster-nodes", "1"),
            *("--offsets-for-times-supported", "true"),
            *("--cluster-id-supported", "true"),
            *("--create-topics-supported", "true"),
            *("--describe-configs-supported", "true"),
            *("--idempotent-producer-supported", "true"),
            *("--expect-record-too-large-exception", "false"),
            *("--describe-acls-supported", "true"),
        )
    finally:
        with ADAPTERS["confluent-kafka"](broker.bootstrap) as admin:
            admin.delete_topic("newtopic")  # the check's own, left behind


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_java_consumer_group_reads_and_is_looked_after(
    tool: Tool, bootstrap: str, make_topic: MakeTopic, protocol: str
) -> None:
    topic = make_topic(2)
    group = f"group-of-{topic}"
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(10))
    printed = tool(
        f"{TOOLS}.consumer.ConsoleConsumer",
        *("--topic", topic, "--group", group, "--from-beginning"),
        *("--max-messages", "10", "--timeout-ms", str(LONGEST_S * 1000)),
        *("--command-property", f"group.protocol={protocol}"),
    )
    assert len(printed.splitlines()) == 10
    groups = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
    this = ("--group", group)
    assert group_offsets(tool(groups, "--describe", *this), topic)[0] == (
        "10",
        "10",
        "0",
    )
    state = tool(groups, "--describe", *this, "--state").splitlines()[-1].split()
    assert state[0] == group
    assert "Empty" in state
    reset = ("--reset-offsets", *this, "--topic", f"{topic}:0", "--to-offset", "4")
    tool(groups, *reset, "--execute")
    assert group_offsets(tool(groups, "--describe", *this), topic)[0] == (
        "4",
        "10",
        "6",
    )
    tool(groups, "--delete", *this)
    assert group not in tool(groups, "--list").split()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_verifiable_consumer_commits_what_it_has_read(
    tool: Tool, bootstrap: str, make_topic: MakeTopic, protocol: str
) -> None:
    topic = make_topic(2)
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(20) + some_records(20, 1))
    printed = tool(
        f"{TOOLS}.VerifiableConsumer",
        *("--topic", topic, "--group-id", topic, "--group-protocol", protocol),
        *("--max-messages", "40", "--reset-policy", "earliest"),
    )
    events = [json.loads(line) for line in printed.splitlines()]
    assigned = [e["partitions"] for e in events if e["name"] == "partitions_assigned"]
    assert {row["partition"] for row in assigned[0]} == {0, 1}
    consumed = [e for e in events if e["name"] == "records_consumed"]
    assert sum(event["count"] for event in consumed) == 40
    commits = [e for e in events if e["name"] == "offsets_committed"]
    assert all(event["success"] for event in commits)
    committed = {
        row["partition"]: row["offset"] for e in commits for row in e["offsets"]
    }
    assert committed == {0: 20, 1: 20}
    # Kafka 4.3's tool tells of the request to end after the end.
    assert "shutdown_complete" in {event["name"] for event in events[-2:]}


@pytest.mark.parametrize("protocol", ["Classic", "Consumer"])
def test_kafka_consumer_groups_shows_members_and_deletes_offsets(
    tool: Tool, bootstrap: str, make_topic: MakeTopic, protocol: str
) -> None:
    topic = make_topic(3)
    groups = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
    this = ("--group", topic)
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(10))
    with Group(bootstrap, topic, topic) as group:
        options = {"protocol": "consumer"} if protocol == "Consumer" else {}
        member = group.add("confluent-kafka", session_ms=60_000, **options)
        group.wait_for_shares([member], 3)
        group.wait_until(lambda: len(member.got) == 10, "all records are read")
        rows = tool(groups, "--describe", *this, "--members", "--verbose").splitlines()
        (row,) = (line for line in rows if line.startswith(topic))
        assert f"{topic}(0,1,2)" in row or f"{topic}:0,1,2" in row
        assert "rdkafka" in row
        listed = tool(groups, "--list", "--state", "Stable").splitlines()
        assert [topic, "Stable"] in [line.split() for line in listed]
        typed = tool(groups, "--list", "--type", protocol.lower()).splitlines()
        assert [topic, protocol] in [line.split() for line in typed]
        member.leave()
    deleted = tool(groups, "--delete-offsets", *this, "--topic", f"{topic}:0")
    assert re.search(rf"(?m)^{topic}\s+0\s+Successful", deleted)
    offsets = group_offsets(tool(groups, "--describe", *this), topic)
    assert 0 not in {n for n, row in offsets.items() if row[0] != "-"}


def group_offsets(described: str, topic: str) -> dict[int, tuple[str, str, str]]:
    """Position, end and lag, by partition."""
    rows = [line.split() for line in described.splitlines() if topic in line.split()]
    return {
        int(row[at + 1]): (row[at + 2], row[at + 3], row[at + 4])
        for row in rows
        for at in (row.index(topic),)
    }


def test_a_share_group_reads_and_is_looked_after(
    tool: Tool, make_topic: MakeTopic, bootstrap: str
) -> None:
    topic = make_topic()
    group = f"queue-of-{topic}"
    this = ("--group", group)
    tool(
        f"{TOOLS}.ConfigCommand",
        *("--alter", "--entity-type", "groups", "--entity-name", group),
        *("--add-config", "share.auto.offset.reset=earliest"),
    )
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(10))
    read = (
        f"{TOOLS}.consumer.ConsoleShareConsumer",
        *("--topic", topic, *this, "--max-messages", "10"),
        *("--timeout-ms", str(LONGEST_S * 1000)),
    )
    # Rejected, and so not delivered again. They are kept in the log.
    assert len(tool(*read, "--reject").splitlines()) == 10
    groups = f"{TOOLS}.consumer.group.ShareGroupCommand"
    assert group in tool(groups, "--list").split()
    # Apache Kafka still shows 0 as the start offset, and moves it with the next change.
    assert _share_offsets(tool(groups, "--describe", *this), topic)[0][1] == "0"
    state = tool(groups, "--describe", *this, "--state").splitlines()[-1].split()
    assert (state[0], "Empty" in state) == (group, True)
    reset = ("--reset-offsets", *this, "--topic", topic, "--to-earliest")
    tool(groups, *reset, "--execute")
    assert _share_offsets(tool(groups, "--describe", *this), topic)[0] == ("0", "10")
    assert len(tool(*read).splitlines()) == 10
    tool(groups, "--delete-offsets", *this, "--topic", topic)
    tool(groups, "--delete", *this)
    assert group not in tool(groups, "--list").split()


def _share_offsets(described: str, topic: str) -> dict[int, tuple[str, str]]:
    """Return start offset and lag of each partition from what the tool printed."""
    rows = [line.split() for line in described.splitlines()]
    return {
        int(row[2]): (row[3], row[4])
        for row in rows
        if len(row) == 5 and row[1] == topic
    }
