"""The quorum of the metadata log, the registered brokers, and directories in v5."""

from __future__ import annotations

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages import add_raft_voter as add
from mpbroker.protocol.messages import describe_log_dirs as dirs
from mpbroker.protocol.messages import describe_quorum as quorum
from mpbroker.protocol.messages import remove_raft_voter as remove
from mpbroker.protocol.messages import unregister_broker as unregister
from mpbroker.server.handler_context import Volume
from mpbroker.server.handlers.add_raft_voter import handle_add_raft_voter
from mpbroker.server.handlers.describe_log_dirs import handle_describe_log_dirs
from mpbroker.server.handlers.describe_quorum import handle_describe_quorum
from mpbroker.server.handlers.remove_raft_voter import handle_remove_raft_voter
from mpbroker.server.handlers.unregister_broker import handle_unregister_broker
from tests.server.contexts import NODE_ID, context
from tests.support.metadata import NOW_MS, start

ANOTHER = 7


@pytest.fixture
def registry(tmp_path):
    return start(tmp_path)


def described(registry, version, topic="__cluster_metadata", *partitions):
    asked = quorum.TopicData(
        topic_name=topic,
        partitions=[quorum.PartitionData(partition_index=p) for p in partitions or [0]],
    )
    response = handle_describe_quorum(
        quorum.DescribeQuorumRequest(topics=[asked]), context(registry, version=version)
    )
    body = response.encode(version)
    answer = quorum.DescribeQuorumResponse.decode(version, memoryview(body))
    assert answer.error_code == ErrorCode.NONE
    return answer


@pytest.mark.parametrize("version", quorum.DescribeQuorumRequest.valid_versions)
def test_the_only_voter_has_all_of_the_metadata_log(registry, version):
    before = described(registry, version).topics[0].partitions[0]
    registry.create_topic("a", 3)
    answer = described(registry, version)
    (partition,) = answer.topics[0].partitions
    assert (partition.leader_id, partition.error_code) == (NODE_ID, ErrorCode.NONE)
    assert partition.high_watermark == before.high_watermark + 4  # a topic's records
    (voter,) = partition.current_voters
    assert voter.replica_id == NODE_ID
    assert voter.log_end_offset == partition.high_watermark
    assert voter.last_caught_up_timestamp == (NOW_MS if version else -1)
    assert partition.observers == []
    assert [each.node_id for each in answer.nodes] == [NODE_ID] * (version == 2)


@pytest.mark.parametrize(
    ("topic", "partitions"),
    [("a", [0]), ("__cluster_metadata", [1]), ("__cluster_metadata", [0, 1])],
)
def test_no_other_partition_has_a_quorum(registry, topic, partitions):
    answer = described(registry, 2, topic, *partitions)
    found = answer.topics[0].partitions
    assert [each.partition_index for each in found] == partitions
    assert {each.error_code for each in found} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


@pytest.mark.parametrize(
    ("cluster_id", "code"),
    [
        (None, ErrorCode.UNSUPPORTED_VERSION),
        ("cluster", ErrorCode.UNSUPPORTED_VERSION),
        ("other", ErrorCode.INCONSISTENT_CLUSTER_ID),
    ],
)
def test_the_voters_stay_as_they_are(registry, cluster_id, code):
    added = handle_add_raft_voter(
        add.AddRaftVoterRequest(cluster_id=cluster_id, voter_id=2), context(registry)
    )
    removed = handle_remove_raft_voter(
        remove.RemoveRaftVoterRequest(cluster_id=cluster_id, voter_id=1),
        context(registry),
    )
    assert (added.error_code, removed.error_code) == (code, code)
    assert added.error_message and removed.error_message


def register(registry, broker_id):
    """Append a registration, as the log of a Kafka has it."""
    registry.change(
        lambda image: [
            {
                "type": "RegisterBrokerRecord",
                "brokerId": broker_id,
                "isMigratingZkBroker": False,
                "incarnationId": "AAAAAAAAAAAAAAAAAAAAAQ",
                "brokerEpoch": 5,
                "endPoints": [],
                "features": [],
                "rack": None,
                "fenced": True,
                "inControlledShutdown": False,
                "logDirs": [],
                "cordonedLogDirs": None,
            }
        ]
    )


class Notes:
    """An intent that a test can hand to a second execution."""

    def __init__(self):
        self.words = ()

    def earlier(self):
        return self.words

    def note(self, words):
        self.words = words


def forget(registry, broker_id, intent=None):
    options = {} if intent is None else {"intent": intent}
    return handle_unregister_broker(
        unregister.UnregisterBrokerRequest(broker_id=broker_id),
        context(registry, **options),
    ).error_code


def test_a_broker_that_has_gone_is_forgotten_once(registry):
    register(registry, ANOTHER)
    notes = Notes()
    assert forget(registry, ANOTHER, notes) == ErrorCode.NONE
    # Killed before the answer, it is executed again, and has succeeded all the same.
    assert forget(registry, ANOTHER, notes) == ErrorCode.NONE
    assert forget(registry, ANOTHER) == ErrorCode.BROKER_ID_NOT_REGISTERED


def test_the_broker_that_answers_stays_registered(registry):
    register(registry, NODE_ID)
    assert forget(registry, NODE_ID) == ErrorCode.INVALID_REQUEST
    assert registry.broker_epoch == 5


@pytest.mark.parametrize("version", [4, 5])
def test_no_directory_is_cordoned(registry, version):
    response = handle_describe_log_dirs(
        dirs.DescribeLogDirsRequest(topics=[]),
        context(registry, log_dirs=["/d"], volume=lambda path: Volume(10, 4)),
    )
    body = response.encode(version)
    (found,) = dirs.DescribeLogDirsResponse.decode(version, memoryview(body)).results
    assert (found.log_dir, found.is_cordoned) == ("/d", False)
