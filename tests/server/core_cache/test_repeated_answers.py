"""Answers that the core repeats: those that Python would give, at any time."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.layout import CONNECTION_SLOT, RowStatus, connection_row
from mpbroker.ipc.tables.partition_table import PartitionTable, note_offline_change
from mpbroker.metadata.acl_records import MetadataAcls, create_acls, delete_acls
from mpbroker.metadata.quota_records import CLIENT_ID, client_quota_record
from mpbroker.metadata.topics import MorePartitions
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.list_offsets import ListOffsetsResponse
from mpbroker.protocol.messages.metadata import MetadataResponse
from mpbroker.server.apis import APIS
from mpbroker.server.authorization.authorizer import StandardAuthorizer
from mpbroker.server.repeated import repeated_answers
from mpbroker.server.repeated.repeated_answers import RepeatedAnswers
from mpbroker.storage.files.leader_epochs import UNDEFINED, EpochEntry, LeaderEpochs
from mpbroker.storage.offline_directories import OfflineDirectories
from tests.server.authorization.test_verdicts import Moody
from tests.server.contexts import NODE_ID
from tests.server.core_cache.answer_stage import (
    EARLIEST,
    LATEST,
    SLOT,
    AnswerStage,
    find_coordinator,
    list_offsets,
    metadata,
)
from tests.server.core_cache.handler_stage import produce_request
from tests.server.core_cache.test_core_requests import batch
from tests.support.children import deaths, die, fork, kill_at_step, steps_of
from tests.support.dead_disk import kill_disk, revive_disk
from tests.support.memory import broker_memory

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

UNKNOWN_TOPIC = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
HEADER = 8  # size and correlation id


@pytest.fixture
def make_stage(tmp_path):
    memories = []

    def make(**options):
        memory = broker_memory()
        memories.append(memory)
        data = tmp_path / str(len(memories))
        made = AnswerStage(memory.__enter__(), data, **options)
        made.registry.create_topic("one", 1)
        made.registry.create_topic("two", 2)
        return made

    yield make
    for memory in memories:
        memory.__exit__(None, None, None)


@pytest.fixture
def stage(make_stage):
    made = make_stage()
    produce(made)
    return made


def produce(stage, topic="one", partition=0, count=1):
    for _ in range(count):
        stage.ask(produce_request(topic, partition, batch()))


def described(answer, version=9):
    """Return a Metadata answer's endpoint, and its topics: code and partitions."""
    body = memoryview(answer)[HEADER + (version >= 9) :]
    found = MetadataResponse.decode(version, body)
    topics = {
        topic.name: (topic.error_code, len(topic.partitions)) for topic in found.topics
    }
    return (found.brokers[0].host, found.brokers[0].port), topics


def offsets(answer, version=7):
    """Return the code and the offset of each partition in a ListOffsets answer."""
    body = memoryview(answer)[HEADER + (version >= 6) :]
    (topic,) = ListOffsetsResponse.decode(version, body).topics
    return [(each.error_code, each.offset) for each in topic.partitions]


def versions(key):
    oldest, newest = APIS[key].versions
    return range(oldest, newest + 1)


# -- what is repeated ----------------------------------------------------------------


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_metadata_of_known_topics_is_repeated(stage, version):
    frame = metadata("one", "two", version=version)
    assert [stage.is_repeated(frame) for _ in range(3)] == [False, True, True]
    _, topics = described(stage.both(frame), version)
    assert topics == {"one": (0, 1), "two": (0, 2)}


@pytest.mark.parametrize("version", versions(ApiKey.LIST_OFFSETS))
@pytest.mark.parametrize("committed", [False, True])
def test_first_and_last_offsets_are_repeated_as_they_are_by_then(
    stage, version, committed
):
    first, last = (
        list_offsets([(0, timestamp)], version=version, committed=committed)
        for timestamp in (EARLIEST, LATEST)
    )
    for end in range(1, 5):
        for frame, offset in ((first, 0), (last, end)):
            assert stage.is_repeated(frame) == (end > 1)
            assert offsets(stage.both(frame), version) == [(0, offset)]
        produce(stage)


@pytest.mark.parametrize("version", versions(ApiKey.FIND_COORDINATOR))
@pytest.mark.parametrize("key_type", [0, 1])
def test_a_coordinator_is_found_again(stage, version, key_type):
    key_type = key_type if version else 0  # version 0 has no types
    frame = find_coordinator(version=version, key_type=key_type)
    assert [stage.is_repeated(frame) for _ in range(3)] == [False, True, True]


def test_each_client_gets_the_correlation_id_of_its_request(stage):
    for number in (1, 2, 0x7FFFFFFF):
        answer = stage.both(metadata("one", correlation_id=number))
        assert answer[4:8] == number.to_bytes(4, "big")


def test_a_request_with_another_byte_is_another_request(stage):
    stage.both(metadata("one"))
    assert not stage.is_repeated(metadata("two"))
    assert not stage.is_repeated(metadata("one", client_id="other"))
    assert not stage.is_repeated(metadata("one", version=10))
    assert not stage.is_repeated(metadata("one", "two"))


def test_offsets_of_several_partitions_are_read_each(stage):
    for partition in (0, 1):
        produce(stage, "two", partition)
    frame = list_offsets([(1, LATEST), (0, LATEST), (1, EARLIEST)], topic="two")
    # A partition that is named twice is an error.
    assert [code for code, _ in offsets(stage.both(frame))] == [
        ErrorCode.INVALID_REQUEST,
        0,
        ErrorCode.INVALID_REQUEST,
    ]
    frame = list_offsets([(1, LATEST), (0, LATEST)], topic="two")
    stage.both(frame)
    produce(stage, "two", 0, count=2)
    assert stage.is_repeated(frame)
    assert offsets(stage.both(frame)) == [(0, 1), (0, 3)]


# -- what changes an answer ----------------------------------------------------------


def test_a_change_of_topics_is_in_the_next_answer(stage):
    registry, frame = stage.registry, metadata("one", "new")
    asked = [metadata("one"), metadata("new"), frame]

    def topics():
        for each in asked:
            stage.both(each)
        return described(stage.both(frame))[1]

    assert topics() == {"one": (0, 1), "new": (UNKNOWN_TOPIC, 0)}
    assert not stage.is_repeated(frame)  # an error is counted each time
    registry.create_topic("new", 1)
    assert topics() == {"one": (0, 1), "new": (0, 1)}
    assert stage.is_repeated(frame)
    registry.create_partitions([MorePartitions("new", 3)])
    assert topics() == {"one": (0, 1), "new": (0, 3)}
    assert stage.is_repeated(frame)
    registry.delete_topic("one")
    assert topics() == {"one": (UNKNOWN_TOPIC, 0), "new": (0, 3)}


def test_a_leader_epoch_that_could_not_be_read_is_not_repeated(stage, monkeypatch):
    """The topic grew after its first partitions were described."""
    frame = metadata("two")
    stage.both(frame)
    with monkeypatch.context() as changed:
        changed.setattr(stage.logs, "leader_epoch", lambda topic, index: UNDEFINED)
        stage.registry.create_partitions([MorePartitions("two", 3)])
        assert not any(stage.is_repeated(frame) for _ in range(3))
    assert not stage.is_repeated(frame)
    assert stage.is_repeated(frame)


def test_an_answer_during_which_metadata_changes_is_not_repeated(stage, monkeypatch):
    registry, frame = stage.registry, metadata("one")
    described, names = stage.broker.described, iter("abcdef")
    find = described.partitions

    def change_meanwhile(topic):
        found = find(topic)
        registry.create_topic(next(names), 1)
        return found

    with monkeypatch.context() as changed:
        changed.setattr(described, "partitions", change_meanwhile)
        for _ in range(2):
            stage.ask(frame, SLOT)
            assert not stage.channel.compiled.repeatable
    stage.both(frame)
    assert stage.is_repeated(frame)


def led(answer, version=9):
    """Return code and leader of each partition of the topic in a Metadata answer."""
    body = memoryview(answer)[HEADER + (version >= 9) :]
    (topic,) = MetadataResponse.decode(version, body).topics
    return [(each.error_code, each.leader_id) for each in topic.partitions]


NOT_AVAILABLE = ErrorCode.LEADER_NOT_AVAILABLE, -1


def test_a_partition_that_goes_offline_has_no_leader_in_the_next_answer(stage):
    """Any process may find that out."""
    frame = metadata("two")
    stage.both(frame)
    assert stage.is_repeated(frame)
    other = PartitionTable(stage.memory.table.segment, stage.memory.control)
    row = other.row(stage.registry.topic("two").partitions[1])
    row.status = RowStatus.OFFLINE
    for _ in range(3):
        assert not stage.is_repeated(frame)  # an error is counted each time
        assert led(stage.both(frame)) == [(0, NODE_ID), NOT_AVAILABLE]
    stage.both(metadata("one"))
    assert stage.is_repeated(metadata("one"))


def test_a_partition_of_a_failed_directory_has_no_leader_until_it_is_back(stage):
    frame = metadata("one")
    stage.both(frame)
    stage.both(list_offsets([(0, LATEST)]))
    assert stage.is_repeated(frame)
    (path,) = (Path(each.path) for each in stage.logs.directories)
    housekeeper = OfflineDirectories(stage.words, stage.logs.directories)
    kill_disk(path)
    housekeeper.look(1)
    for _ in range(2):
        assert not stage.is_repeated(frame)
        assert led(stage.both(frame)) == [NOT_AVAILABLE]
    revive_disk(path)
    housekeeper.look(2)
    assert led(stage.both(frame)) == [(0, NODE_ID)]
    assert stage.is_repeated(frame)


def test_an_answer_during_which_a_partition_goes_offline_is_not_repeated(
    stage, monkeypatch
):
    frame, described = metadata("one"), stage.broker.described
    find = described.partitions

    def fail_meanwhile(topic):
        found = find(topic)
        note_offline_change(stage.words)
        return found

    with monkeypatch.context() as changed:
        changed.setattr(described, "partitions", fail_meanwhile)
        for _ in range(2):
            stage.ask(frame, SLOT)
            assert not stage.channel.compiled.repeatable
    stage.both(frame)
    assert stage.is_repeated(frame)


def test_a_topic_of_the_same_name_is_another_one(stage):
    for frame in (metadata("one", version=12), list_offsets([(0, LATEST)])):
        stage.both(frame)
        assert stage.is_repeated(frame)
    stage.logs.delete_topic(stage.registry.delete_topic("one"))
    assert offsets(stage.both(list_offsets([(0, LATEST)]))) == [(UNKNOWN_TOPIC, -1)]
    stage.registry.create_topic("one", 1)
    stage.both(metadata("one", version=12))  # with the topic's id
    assert offsets(stage.both(list_offsets([(0, LATEST)]))) == [(0, 0)]


def test_a_client_is_told_the_address_that_it_dialled_or_that_is_advertised(stage):
    frame = metadata("one")
    dials = [
        ({}, ("127.0.0.1", 9092)),
        ({"dialled": ("127.0.0.2", 9092)}, ("127.0.0.2", 9092)),
        ({"dialled": ("127.0.0.1", 9093)}, ("127.0.0.1", 9093)),
        ({"listener": 1}, ("two.example", 9094)),
    ]
    for _ in range(2):
        for how, told in dials:
            stage.is_from(**how)
            assert described(stage.both(frame))[0] == told
            stage.both(find_coordinator())
    assert stage.is_repeated(frame)
    # Without an authorizer the clients of all hosts share an answer.
    stage.is_from(host="10.9.9.9", listener=1)
    assert stage.is_repeated(frame)


def test_deleted_records_and_open_transactions_count_at_once(stage):
    produce(stage, count=9)
    asked = [
        list_offsets([(0, timestamp)], committed=committed)
        for timestamp in (EARLIEST, LATEST)
        for committed in (False, True)
    ]
    for frame in asked:
        stage.both(frame)
    row = stage.log("one").row
    for unstable, start in ((7, 0), (7, 5), (7, 8), (-1, 8)):
        with row.locked():
            row.publish(row.snapshot()._replace(first_unstable_offset=unstable))
        row.log_start_offset = start
        assert all(stage.is_repeated(frame) for frame in asked)
        found = [offsets(stage.both(frame))[0][1] for frame in asked]
        stable = 10 if unstable < 0 else max(unstable, start)
        assert found == [start, start, 10, stable]


@pytest.mark.parametrize("status", [RowStatus.OFFLINE, RowStatus.DELETED])
def test_a_partition_that_is_not_online_is_left_to_python(stage, status):
    frame = list_offsets([(0, LATEST)])
    stage.both(frame)
    assert stage.is_repeated(frame)
    row = stage.log("one").row
    row.status = status
    assert not stage.is_repeated(frame)
    assert offsets(stage.both(frame))[0][0] != 0
    row.status = RowStatus.ONLINE
    stage.both(frame)
    assert stage.is_repeated(frame)


def test_a_partition_without_files_is_left_to_python(stage):
    frame = list_offsets([(0, LATEST), (1, LATEST)], topic="two")
    produce(stage, "two", 0)
    assert not any(stage.is_repeated(frame) for _ in range(3))
    produce(stage, "two", 1)
    stage.both(frame)
    assert stage.is_repeated(frame)


@pytest.mark.parametrize("timestamp", [0, 1000, -3, -4, -5, -7])
def test_other_timestamps_are_left_to_python(stage, timestamp):
    frame = list_offsets([(0, timestamp)], version=9)
    assert not any(stage.is_repeated(frame) for _ in range(3))


def test_offsets_of_earlier_leader_epochs_are_left_to_python(stage):
    """A log that Apache Kafka has written: it had another leader from 3 on."""
    view = stage.log("one").view
    view._epochs = LeaderEpochs([EpochEntry(0, 0), EpochEntry(4, 3)])
    produce(stage, count=4)
    first, last = list_offsets([(0, EARLIEST)]), list_offsets([(0, LATEST)])
    assert [stage.is_repeated(first) for _ in range(3)] == [False] * 3
    assert [stage.is_repeated(last) for _ in range(3)] == [False, True, True]
    view.row.log_start_offset = 4
    assert [stage.is_repeated(first) for _ in range(2)] == [False, True]
    view.row.log_start_offset = 2  # not in a broker's life, but the core looks
    assert not stage.is_repeated(first)


def test_a_client_that_knows_another_leader_epoch_is_refused_each_time(stage):
    assert stage.both(list_offsets([(0, LATEST)], epoch=0))
    assert stage.is_repeated(list_offsets([(0, LATEST)], epoch=0))
    newer = list_offsets([(0, LATEST)], epoch=1)
    assert not any(stage.is_repeated(newer) for _ in range(2))


class Nodes:
    """The other nodes of a cluster: none is live."""

    def others(self, listener):
        return []

    def coordinator(self, key):
        return 1

    def offline(self):
        return {}


def test_nothing_of_a_cluster_is_repeated(make_stage):
    stage = make_stage(nodes=Nodes())
    produce(stage)
    for frame in (metadata("one"), list_offsets([(0, LATEST)]), find_coordinator()):
        assert not any(stage.is_repeated(frame) for _ in range(3))


# -- who asks ------------------------------------------------------------------------


def acl(operation, resource, name, principal="User:alice"):
    return AclBinding(
        resource,
        name,
        PatternType.LITERAL,
        principal,
        "*",
        operation,
        AclPermissionType.ALLOW,
    )


DESCRIBE = AclOperation.DESCRIBE
RULES = [
    acl(DESCRIBE, ResourceType.TOPIC, "one"),
    acl(DESCRIBE, ResourceType.GROUP, "group"),
]


@pytest.fixture
def guarded(make_stage):
    made = make_stage(
        authorizer=lambda registry: StandardAuthorizer(MetadataAcls(registry))
    )
    made.registry.catch_up()
    made.log("one").view.state()  # it has files
    create_acls(made.registry, RULES)
    return made


def test_an_answer_is_for_its_sender_only(guarded):
    frames = [metadata("one"), list_offsets([(0, LATEST)]), find_coordinator()]
    for frame in frames:
        guarded.is_from("User:alice")
        allowed = guarded.both(frame)
        assert guarded.is_repeated(frame)
        for _ in range(2):
            guarded.is_from("User:bob")
            assert guarded.both(frame) != allowed
            assert not guarded.is_repeated(frame)  # each denial is logged
        guarded.is_from("User:alice", host="10.0.0.2")
        assert not guarded.is_repeated(frame)
        guarded.is_from("User:alice")
        assert guarded.is_repeated(frame)


def test_a_changed_acl_counts_for_the_next_request(guarded):
    frames = [metadata("one"), list_offsets([(0, LATEST)]), find_coordinator()]
    guarded.is_from("User:alice")
    allowed = [guarded.both(frame) for frame in frames]
    assert all(guarded.is_repeated(frame) for frame in frames)
    delete_acls(guarded.registry, [AclFilter()])
    denied = [guarded.both(frame) for frame in frames]
    assert all(one != other for one, other in zip(allowed, denied, strict=True))
    create_acls(guarded.registry, RULES)
    assert [guarded.both(frame) for frame in frames] == allowed


def test_rules_that_change_at_any_time_count_for_the_next_request(make_stage):
    moody = Moody()
    stage = make_stage(authorizer=lambda registry: moody)
    frame = metadata("one")
    stage.both(frame)
    assert stage.is_repeated(frame)
    moody.answer, moody.current = False, 2
    assert described(stage.both(frame))[1] == {
        "one": (ErrorCode.TOPIC_AUTHORIZATION_FAILED, 0)
    }
    moody.answer, moody.current = True, 3
    stage.both(frame)
    assert stage.is_repeated(frame)
    moody.current = None  # its decisions must not be kept
    assert not any(stage.is_repeated(frame) for _ in range(3))


def test_what_a_rule_has_added_to_is_not_repeated(guarded):
    guarded.is_from("User:alice")
    frame = metadata("one", "two")
    assert not any(guarded.is_repeated(frame) for _ in range(3))


def test_the_answer_of_a_client_that_has_gone_is_not_kept(stage):
    frame = metadata("one")
    stage.both(frame)
    stage.words[connection_row(0) + CONNECTION_SLOT] = 0
    assert not any(stage.is_repeated(frame) for _ in range(2))
    stage.is_from()
    assert stage.is_repeated(frame)


def test_a_throttled_answer_is_not_repeated(stage):
    frame = metadata("one", version=9)
    key = ((CLIENT_ID, "test"),)
    stage.registry.change(
        lambda image: [client_quota_record(key, "request_percentage", 1e-9)]
    )
    told = []
    for _ in range(6):
        _, answer = stage.ask(frame, SLOT)
        body = memoryview(answer)[HEADER + 1 :]
        told.append(MetadataResponse.decode(9, body).throttle_time_ms)
    assert told[-1] > 0
    stage.registry.change(
        lambda image: [client_quota_record(key, "request_percentage", None)]
    )
    stage.both(frame)
    assert stage.is_repeated(frame)
    body = memoryview(stage.both(frame))[HEADER + 1 :]
    assert MetadataResponse.decode(9, body).throttle_time_ms == 0


# -- memory --------------------------------------------------------------------------


def test_the_number_of_answers_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(repeated_answers, "MAX_ANSWERS", 4)
    table = stage.channel.compiled.repeatable
    for number in range(20):
        stage.both(metadata("one", client_id=str(number)))
        assert len(table) <= 4
        assert stage.is_repeated(metadata("one", client_id=str(number)))


def test_the_bytes_of_answers_are_bounded(stage, monkeypatch):
    monkeypatch.setattr(repeated_answers, "MAX_BYTES", 1000)
    table = stage.channel.compiled.repeatable
    for number in range(20):
        stage.both(metadata("one", client_id=str(number)))
        size = sum(len(key) + sum(map(len, entry)) for key, entry in table.items())
        assert 0 < size <= 1000


def test_long_requests_and_long_answers_are_left_to_python(stage):
    long = metadata("one", client_id="c" * 2100)
    assert not any(stage.is_repeated(long) for _ in range(3))
    stage.both(metadata("one"))
    table = stage.channel.compiled.repeatable
    entries = dict(table)
    asked = SimpleNamespace(slot=SLOT, flexible_response=True, api_version=9)
    RepeatedAnswers(stage.channel.compiled).add(asked, bytes(16 * 1024))
    assert table == entries


def test_an_entry_that_does_not_fit_is_left_to_python(stage):
    """The core trusts no number of its table."""
    frame = list_offsets([(0, LATEST)])
    stage.both(frame)
    table = stage.channel.compiled.repeatable
    ((key, (body, places)),) = table.items()
    word = 8
    for at, value in (
        (0, -1),
        (0, len(body) - 7),
        (0, 1 << 62),
        (1, -1),
        (1, 1 << 40),
        (3, 1 << 40),
    ):
        bad = bytearray(places)
        bad[at * word : (at + 1) * word] = value.to_bytes(word, "little", signed=True)
        table[key] = body, bytes(bad)
        assert not stage.is_repeated(frame)
    for entry in (None, (body,), (body, None), (None, places), (bytes(1 << 20), b"")):
        table[key] = entry
        assert not stage.is_repeated(frame)


# -- any history ---------------------------------------------------------------------

_names = st.lists(st.sampled_from(["one", "two", "new", "öne", ""]), max_size=3)
_timestamps = st.sampled_from([LATEST, LATEST, EARLIEST, -3, -4, 0])
_asked = st.one_of(
    st.builds(
        lambda names, version: metadata(*names, version=version),
        _names,
        st.sampled_from(versions(ApiKey.METADATA)),
    ),
    st.builds(
        lambda wanted, topic, version, committed, epoch: list_offsets(
            wanted, topic=topic, version=version, committed=committed, epoch=epoch
        ),
        st.lists(st.tuples(st.integers(-1, 2), _timestamps), max_size=3),
        st.sampled_from(["one", "two", "two", "new"]),
        st.sampled_from([1, 2, 4, 6, 7, 11]),
        st.booleans(),
        st.sampled_from([-1, -1, 0, 1]),
    ),
    st.builds(
        lambda version: find_coordinator(version=version),
        st.sampled_from(versions(ApiKey.FIND_COORDINATOR)),
    ),
)
_events = st.sampled_from(
    ["produce one", "produce two", "new topic", "no topic", "start", "open", "client"]
)


def _happen(stage, event):
    registry = stage.registry
    row = stage.log("one").row
    if event.startswith("produce"):
        produce(stage, event.split()[1])
    elif event == "new topic" and registry.topic("new") is None:
        registry.create_topic("new", 1)
    elif event == "no topic" and registry.topic("new") is not None:
        registry.delete_topic("new")
    elif event == "start":
        row.log_start_offset = row.log_end_offset
    elif event == "open":
        with row.locked():
            state = row.snapshot()
            end = state.log_end_offset
            unstable = end if state.first_unstable_offset < 0 else -1
            row.publish(state._replace(first_unstable_offset=unstable))
    elif event == "client":
        stage.is_from(dialled=("127.0.0.1", row.log_end_offset + 1))


@settings(max_examples=60)
@given(
    frames=st.lists(_asked, min_size=1, max_size=4),
    events=st.lists(_events, max_size=6),
)
def test_whatever_happens_the_core_answers_what_python_does(
    tmp_path_factory, frames, events
):
    with broker_memory() as memory:
        stage = AnswerStage(memory, tmp_path_factory.mktemp("answers") / "data")
        stage.registry.create_topic("one", 1)
        stage.registry.create_topic("two", 2)
        for event in ["produce one", "produce two", *events]:
            _happen(stage, event)
            for frame in frames * 2:
                stage.both(frame)
        stage.logs.close_files()


# -- deaths --------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [metadata("one"), list_offsets([(0, LATEST)])])
def test_a_handler_killed_at_any_step_leaves_the_request_to_the_next(stage, frame):
    def ask():
        stage.publish(frame, SLOT)
        stage.handler.turn()
        return stage.answer(SLOT)

    ask()
    expected = ask()
    assert stage.short_ways
    for step in deaths(steps_of(ask), 50, seed=1):
        stage.publish(frame, SLOT)

        def doomed(step=step):
            kill_at_step(step)
            stage.handler.turn()
            die()

        assert fork(doomed) == -signal.SIGKILL
        stage.memory.ring.reclaim(0)
        if not stage.memory.responses[0].waiting():
            if not stage.memory.ring.waiting():
                stage.memory.ring.put_back([SLOT])
            stage.handler.turn()
        assert stage.answer(SLOT) == expected
