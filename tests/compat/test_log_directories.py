"""Log directories of Apache Kafka and of us: partitions move, and directories fail."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from mpbroker.base.java_hash import java_hash
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from mpbroker.protocol.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    TopicRequest,
)
from mpbroker.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    TopicPartitions,
)
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from mpbroker.storage.files.leader_epochs import UNDEFINED
from tests.bench import wire
from tests.compat.adapters import ADAPTERS
from tests.compat.records import some_records
from tests.compat.test_java_tools import TOOLS, run_java
from tests.support.apache_kafka import ApacheKafka
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.dead_disk import kill_disk, revive_disk
from tests.support.fetch_clients import have_java_tools
from tests.support.patience import LONGEST_S

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
    pytest.mark.timeout(600),
]

_OFFSETS: Final = "offsets.topic.num.partitions"
GROUP_PARTITIONS: Final = 4

REASSIGN = f"{TOOLS}.reassign.ReassignPartitionsCommand"


@pytest.fixture(params=["mpbroker", "apache kafka"])
def two_directories(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Broker | ApacheKafka]:
    """A broker with the log directories `data` and `other`."""
    paths = f"{tmp_path}/data,{tmp_path}/other"
    if request.param == "mpbroker":
        settings = {"log.dirs": paths, "node.id": 1, _OFFSETS: GROUP_PARTITIONS}
        with Broker(tmp_path / "data", settings) as ours:
            yield ours
    else:
        both = f"log.dirs={paths}\n{_OFFSETS}={GROUP_PARTITIONS}\n"
        with ApacheKafka(tmp_path / "data", heap="400m", properties=both) as theirs:
            yield theirs


@pytest.fixture
def bootstrap_of_two(two_directories: Broker | ApacheKafka) -> str:
    return two_directories.bootstrap


def tool(bootstrap: str, *arguments: str) -> str:
    return run_java(arguments[0], "--bootstrap-server", bootstrap, *arguments[1:])


def directories(bootstrap: str, topic: str) -> dict[str, list[dict[str, object]]]:
    """The topic's partitions by the name of the log directory, as kafka-log-dirs says.

    Without sizes.
    """
    said = tool(bootstrap, f"{TOOLS}.LogDirsCommand", "--describe")
    (broker,) = json.loads(said.splitlines()[-1])["brokers"]
    return {
        Path(each["logDir"]).name: [
            {name: row[name] for name in ("partition", "offsetLag", "isFuture")}
            for row in each["partitions"]
            if row["partition"].startswith(f"{topic}-")
        ]
        for each in broker["logDirs"]
        if each["error"] is None
    }


def plan_of(path: Path, topic: str, where: str) -> tuple[str, str]:
    row = {"topic": topic, "partition": 0, "replicas": [1], "log_dirs": [where]}
    path.write_text(json.dumps({"version": 1, "partitions": [row]}))
    return "--reassignment-json-file", str(path)


def test_kafkas_tools_move_a_partition(
    bootstrap_of_two: str, topic_name: str, tmp_path: Path
) -> None:
    bootstrap, plan = bootstrap_of_two, tmp_path / "plan.json"
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.create_topic(topic_name, 1)
        wait_until(lambda: client.topics().get(topic_name) == 1)
        client.produce(topic_name, some_records(200))
    (here,) = tmp_path.glob(f"*/{topic_name}-0")
    there = tmp_path / ("other" if here.parent.name == "data" else "data")
    this = plan_of(plan, topic_name, str(there))
    said = tool(bootstrap, REASSIGN, "--execute", *this)
    started = f"Successfully started moving log directory to {there} for replica"
    assert f"{started} {topic_name}-0 with broker 1" in said
    while "is still in progress" in (
        said := tool(bootstrap, REASSIGN, "--verify", *this)
    ):
        pass
    assert re.search(
        rf"Reassignment of replica {topic_name}-0-1 completed successfully", said
    )
    row = {"partition": f"{topic_name}-0", "offsetLag": 0, "isFuture": False}
    assert directories(bootstrap, topic_name) == {
        there.name: [row],
        here.parent.name: [],
    }
    assert (there / f"{topic_name}-0").is_dir()
    assert not here.exists()
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        assert client.offsets(topic_name, 0) == (0, 200)
        client.produce(topic_name, some_records(5))
        assert client.offsets(topic_name, 0) == (0, 205)
    this = plan_of(plan, topic_name, str(tmp_path / "nowhere"))
    with pytest.raises(AssertionError, match="LogDirNotFoundException"):
        tool(bootstrap, REASSIGN, "--execute", *this, "--timeout", "1000")


# -- a directory that fails, or is not there -----------------------------------------


class Place(NamedTuple):
    """What a partition's row says: error, leader, and the nodes by what they are."""

    error_code: int
    leader_id: int
    replica_nodes: list[int]
    isr_nodes: list[int]
    offline_replicas: list[int]


LED: Final = Place(0, 1, [1], [1], [])
LEADERLESS: Final = Place(ErrorCode.LEADER_NOT_AVAILABLE, -1, [1], [], [1])
# DescribeTopicPartitions has the same in a row, without an error. It also has the last
# replica in sync. (Kafka calls it eligible as long as the broker has not stopped.)
DESCRIBED: Final = {
    LED.leader_id: (LED, []),
    LEADERLESS.leader_id: (LEADERLESS._replace(error_code=0), [1]),
}
# ElectLeaders: the error for a partition without a leader, by the election's type.
NOT_ELECTED: Final = {
    0: ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
    1: ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
}


def rows_of(topic: Any) -> list[Any]:
    return sorted(topic.partitions, key=attrgetter("partition_index"))


def place_of(row: Any) -> Place:
    return Place(*(getattr(row, field) for field in Place._fields))


def ask(bootstrap: str, version: int, request: Any, response: Any) -> Any:
    host, _, port = bootstrap.rpartition(":")
    framed = wire.request((int(request.api_key), version), request.encode(version))
    with wire.Connection((host, int(port)), LONGEST_S) as connection:
        return response.decode(version, memoryview(connection.ask(framed))[5:])


def described(bootstrap: str, topic: str) -> list[Any]:
    """The rows of a topic's partitions in Metadata."""
    request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)])
    (found,) = ask(bootstrap, 12, request, MetadataResponse).topics
    return rows_of(found)


def places(bootstrap: str, topic: str) -> list[Place]:
    return [place_of(row) for row in described(bootstrap, topic)]


def check_others(bootstrap: str, topic: str, told: list[Place]) -> None:
    """Compare what other APIs say of a topic's partitions with what Metadata told."""
    request = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=topic)])
    (found,) = ask(bootstrap, 0, request, DescribeTopicPartitionsResponse).topics
    rows = [(place_of(row), row.last_known_elr) for row in rows_of(found)]
    assert rows == [DESCRIBED[place.leader_id] for place in told]
    for kind, code in NOT_ELECTED.items():
        wanted = TopicPartitions(topic=topic, partitions=[*range(len(told))])
        for named in ([wanted], None):
            request = ElectLeadersRequest(
                election_type=kind, topic_partitions=named, timeout_ms=10_000
            )
            answer = ask(bootstrap, 2, request, ElectLeadersResponse)
            codes = {
                each.partition_id: each.error_code
                for result in answer.replica_election_results
                if result.topic == topic
                for each in result.partition_result
            }
            assert codes == {
                number: code if place == LEADERLESS else ErrorCode.ELECTION_NOT_NEEDED
                for number, place in enumerate(told)
                if named or place == LEADERLESS
            }


def groups_of_partitions() -> list[str]:
    """A group for each partition of groups' offsets."""
    found: dict[int, str] = {}
    for number in itertools.count():
        name = f"group-{number}"
        found.setdefault(java_hash(name) % GROUP_PARTITIONS, name)
        if len(found) == GROUP_PARTITIONS:
            break
    return [found[number] for number in range(GROUP_PARTITIONS)]


def commit(bootstrap: str, topic: str, group: str) -> int:
    """Commit an offset of the topic; return the error."""
    row = OffsetCommitRequestPartition(
        partition_index=0, committed_offset=1, committed_metadata=""
    )
    topics = [OffsetCommitRequestTopic(name=topic, partitions=[row])]
    request = OffsetCommitRequest(group_id=group, member_id="", topics=topics)
    (found,) = ask(bootstrap, 8, request, OffsetCommitResponse).topics
    return int(found.partitions[0].error_code)


def produce(bootstrap: str, topic: str, partitions: int) -> list[int]:
    """Produce a record to each partition of a topic; return the errors."""
    host, _, port = bootstrap.rpartition(":")
    content = wire.record_batch([wire.RecordSpec(b"x")])
    with wire.Connection((host, int(port)), LONGEST_S) as connection:
        return [
            wire.parse_produce(
                connection.ask(wire.produce(topic, number, content))
            ).error_code
            for number in range(partitions)
        ]


def refusals(bootstrap: str, topic: str, partitions: int) -> set[tuple[int, ...]]:
    """What the leader alone answers: the errors of the partitions in each answer."""
    numbers = range(partitions)
    lists = [
        ListOffsetsTopic(
            name=topic,
            partitions=[
                ListOffsetsPartition(partition_index=number, timestamp=timestamp)
                for number in numbers
            ],
        )
        for timestamp in (-1, -2, -3, 0)
    ]
    fetched = [
        FetchPartition(partition=number, fetch_offset=0, partition_max_bytes=1000)
        for number in numbers
    ]
    deleted = [
        DeleteRecordsPartition(partition_index=number, offset=0) for number in numbers
    ]
    epochs = [
        OffsetForLeaderPartition(partition=number, leader_epoch=0) for number in numbers
    ]
    found = {tuple(produce(bootstrap, topic, partitions))}
    for version, request, response in (
        (
            12,
            FetchRequest(topics=[FetchTopic(topic=topic, partitions=fetched)]),
            FetchResponse,
        ),
        *(
            (9, ListOffsetsRequest(replica_id=-1, topics=[each]), ListOffsetsResponse)
            for each in lists
        ),
        (
            2,
            DeleteRecordsRequest(
                topics=[DeleteRecordsTopic(name=topic, partitions=deleted)],
                timeout_ms=10_000,
            ),
            DeleteRecordsResponse,
        ),
        (
            4,
            OffsetForLeaderEpochRequest(
                replica_id=-1,
                topics=[OffsetForLeaderTopic(topic=topic, partitions=epochs)],
            ),
            OffsetForLeaderEpochResponse,
        ),
    ):
        answer = ask(bootstrap, version, request, response)
        (of_topic,) = answer.responses if response is FetchResponse else answer.topics
        is_by_epoch = response is OffsetForLeaderEpochResponse
        errors = {
            each.partition if is_by_epoch else each.partition_index: each.error_code
            for each in of_topic.partitions
        }
        found.add(tuple(errors[number] for number in numbers))
    return found


def coordinators(bootstrap: str) -> list[int]:
    """The errors of FindCoordinator, for a group in each partition of their offsets."""
    groups = groups_of_partitions()
    request = FindCoordinatorRequest(key_type=0, coordinator_keys=groups)
    answer = ask(bootstrap, 4, request, FindCoordinatorResponse)
    codes = {each.key: each.error_code for each in answer.coordinators}
    return [codes[group] for group in groups]


def test_partitions_of_a_lost_directory_have_no_leader(
    two_directories: Broker | ApacheKafka, topic_name: str, tmp_path: Path
) -> None:
    """It fails while the broker runs, and at its next start; then it is back."""
    broker, directory = two_directories, tmp_path / "other"
    with ADAPTERS["confluent-kafka"](broker.bootstrap) as client:
        client.create_topic(topic_name, 4)
        wait_until(lambda: client.topics().get(topic_name) == 4)
    # Ours makes the directory of a partition when it is first used.
    wait_until(lambda: not any(produce(broker.bootstrap, topic_name, 4)))
    wait_until(lambda: not any(coordinators(broker.bootstrap)))
    for group in groups_of_partitions():
        wait_until(lambda group=group: not commit(broker.bootstrap, topic_name, group))
    lost = {int(path.name[-1]) for path in directory.glob(f"{topic_name}-*")}
    groups = {int(path.name[-1]) for path in directory.glob("__consumer_offsets-*")}
    assert 0 < len(lost) < 4 and 0 < len(groups) < GROUP_PARTITIONS
    without = [LEADERLESS if n in lost else LED for n in range(4)]

    def are(wanted: list[Place]) -> None:
        wait_until(lambda: places(broker.bootstrap, topic_name) == wanted)
        for _ in range(3):  # also if it is repeated
            assert places(broker.bootstrap, topic_name) == wanted
            check_others(broker.bootstrap, topic_name, wanted)
            assert coordinators(broker.bootstrap) == [
                ErrorCode.COORDINATOR_NOT_AVAILABLE
                if number in groups and LEADERLESS in wanted
                else ErrorCode.NONE
                for number in range(GROUP_PARTITIONS)
            ]

    are([LED] * 4)
    kill_disk(directory)
    are(without)
    broker.stop()
    broker.start()
    are(without)
    # Kafka 4.4.0 answers all with this error in one run, with the other in the next.
    codes = [ErrorCode.NOT_LEADER_OR_FOLLOWER]
    if isinstance(broker, ApacheKafka):
        codes.append(ErrorCode.KAFKA_STORAGE_ERROR)
    assert refusals(broker.bootstrap, topic_name, 4) in [
        {tuple(code if n in lost else ErrorCode.NONE for n in range(4))}
        for code in codes
    ]
    # Kafka's controller has made a new epoch, without a leader. Ours is in the
    # directory, and must not go back when that is there again: clients would then
    # take what they are told for old.
    epochs = [row.leader_epoch for row in described(broker.bootstrap, topic_name)]
    assert all(
        (epochs[n] == UNDEFINED) == (n in lost and isinstance(broker, Broker))
        for n in range(4)
    )
    broker.stop()
    revive_disk(directory)
    broker.start()
    are([LED] * 4)
    assert refusals(broker.bootstrap, topic_name, 4) == {(ErrorCode.NONE,) * 4}
