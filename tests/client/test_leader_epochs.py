"""A consumer knows who led when what it read was written, and notices what was lost.

Mirrors the truncation tests of Kafka's SubscriptionStateTest and
OffsetsForLeaderEpochClientTest.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer, LogTruncationError
from mpbroker.client.consumer.position_epochs import NO_EPOCH, PositionEpochs
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.fetch import EpochEndOffset
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset as EndOfEpoch,
)
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from tests.client.fake_broker import CLOSE, FakeBroker
from tests.client.test_consumer import fill, values
from tests.client.test_fetcher import answer_for, batch_of

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)
MISSING = TopicPartition("missing", 0)
ASK = ApiKey.OFFSET_FOR_LEADER_EPOCH
ID, OTHER_ID = b"a" * 16, b"b" * 16


@pytest.fixture
def make_consumer(fake_broker):
    made = []

    def make(**settings):
        consumer = Consumer(
            bootstrap_servers=str(fake_broker.address),
            **({"auto_offset_reset": "earliest"} | settings),
        )
        made.append(consumer)
        consumer.assign([T0])
        return consumer

    yield make
    for consumer in made:
        consumer.close()


def append(broker, *numbers):
    for number in numbers:
        broker.append("t", 0, batch_of(b"%d" % number))


def asked(broker, api=ApiKey.FETCH):
    """The last question about the partition."""
    return broker.seen(api)[-1].topics[0].partitions[0]


def epochs_asked(broker):
    entry = asked(broker)
    return entry.current_leader_epoch, entry.last_fetched_epoch


# -- what is told to brokers -----------------------------------------------------------


def test_questions_carry_the_leaders_epoch(fake_broker, make_consumer):
    fake_broker.leader_epochs[T0] = 3
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    assert asked(fake_broker, ApiKey.LIST_OFFSETS).current_leader_epoch == 3
    consumer.poll(1)
    assert asked(fake_broker).fetch_offset == 2
    # The epoch of what was read is for followers to tell: no consumer of Kafka's does.
    assert epochs_asked(fake_broker) == (3, NO_EPOCH)


def test_epochs_of_older_brokers_are_not_believed(fake_broker, make_consumer):
    fake_broker.max_versions[ApiKey.METADATA] = 8
    append(fake_broker, 0)
    consumer = make_consumer()
    assert values(consumer, 1) == [0]
    consumer.poll(1)
    assert epochs_asked(fake_broker) == (NO_EPOCH, NO_EPOCH)


def test_a_commit_tells_the_epoch_of_what_was_read(bootstrap, topic_name):
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        cluster.topic(topic_name, auto_create=True)
        fill(bootstrap, topic_name, range(3))
        request = OffsetFetchRequest(
            group_id=topic_name,
            topics=[OffsetFetchRequestTopic(name=topic_name, partition_indexes=[0])],
        )
        with Consumer(
            bootstrap_servers=bootstrap,
            group_id=topic_name,
            auto_offset_reset="earliest",
        ) as consumer:
            consumer.assign([(topic_name, 0)])
            assert values(consumer, 3) == [0, 1, 2]
            told = []
            # A position that was only named is of nobody's epoch.
            for position in (None, {TopicPartition(topic_name, 0): 7}):
                consumer.commit(position)
                answer = cluster.request(request, OffsetFetchResponse, max_version=7)
                (entry,) = answer.topics[0].partitions
                told.append((entry.committed_offset, entry.committed_leader_epoch))
    assert told == [(3, 0), (7, NO_EPOCH)]


# -- new leaders -----------------------------------------------------------------------


def test_a_leader_of_a_later_epoch_is_found_and_asked_whether_it_has_what_was_read(
    fake_broker, make_consumer
):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    fake_broker.elect("t", 0, end=2)
    append(fake_broker, 2)
    assert values(consumer, 1) == [2]
    question = asked(fake_broker, ASK)
    assert (question.current_leader_epoch, question.leader_epoch) == (1, 0)
    assert fake_broker.seen(ASK)[-1].replica_id == -1
    append(fake_broker, 3)
    assert values(consumer, 1) == [3]
    assert len(fake_broker.seen(ASK)) == 1  # it has confirmed that once
    consumer.poll(1)
    assert epochs_asked(fake_broker) == (1, NO_EPOCH)


def test_a_reset_goes_to_where_the_new_leaders_log_differs(
    fake_broker, make_consumer, caplog
):
    append(fake_broker, 0, 1, 2, 3)
    consumer = make_consumer()
    assert values(consumer, 4) == [0, 1, 2, 3]
    fake_broker.elect("t", 0, end=2)
    append(fake_broker, 12, 13, 14)  # past what was read
    assert values(consumer, 3) == [12, 13, 14]
    assert "t-0 has lost records before offset 4" in caplog.text
    assert "going on at 2" in caplog.text


def test_without_a_rule_for_resets_a_loss_is_told_until_somebody_seeks(
    fake_broker, make_consumer
):
    append(fake_broker, 0, 1, 2, 3)
    consumer = make_consumer(auto_offset_reset="none")
    consumer.seek(T0, 0)
    assert values(consumer, 4) == [0, 1, 2, 3]
    fake_broker.elect("t", 0, end=2)
    append(fake_broker, 12, 13, 14)
    for _ in range(2):
        with pytest.raises(LogTruncationError, match="from offset 2 on") as caught:
            values(consumer, 1)
        assert caught.value.partition == T0
        assert caught.value.offset == 4
        assert caught.value.divergent_offset == 2
        assert caught.value.divergent_epoch == 0
    consumer.seek(T0, caught.value.divergent_offset)
    assert values(consumer, 3) == [12, 13, 14]


def test_a_loss_that_is_found_while_others_are_looked_for_is_told_no_less(
    fake_broker, make_consumer
):
    """The leader is the same broker, and knows of no reason to refuse."""
    append(fake_broker, 0, 1, 2, 3)
    consumer = make_consumer(auto_offset_reset="none")
    consumer.assign([T0, MISSING])
    consumer.seek(T0, 0)
    consumer.seek(MISSING, 0)
    assert values(consumer, 4) == [0, 1, 2, 3]
    assert consumer.poll(1) == {}  # nothing is on its way
    fake_broker.elect("t", 0, end=2)
    append(fake_broker, 12, 13, 14)
    consumer._look_again_at = 0.0
    for _ in range(3):
        with pytest.raises(LogTruncationError):
            values(consumer, 1)
    consumer.seek(T0, 2)
    assert values(consumer, 3) == [12, 13, 14]


def test_a_leader_that_knows_nothing_of_the_epoch_is_read_by_the_rule_for_resets(
    fake_broker, make_consumer
):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    fake_broker.elect("t", 0, end=0)
    append(fake_broker, 10, 11, 12)
    assert values(consumer, 3) == [10, 11, 12]


@pytest.mark.parametrize("end", [1, 3, 5])
def test_what_an_answer_to_a_fetch_says_of_a_loss_was_not_asked(
    fake_broker, make_consumer, end
):
    append(fake_broker, 0, 1, 2)
    consumer = make_consumer()
    assert values(consumer, 3) == [0, 1, 2]

    def diverging(request):
        answer = answer_for()(request)
        (data,) = answer.responses[0].partitions
        data.diverging_epoch = EpochEndOffset(epoch=0, end_offset=end)
        return answer

    fake_broker.answer_with(ApiKey.FETCH, diverging)
    append(fake_broker, 3)
    assert values(consumer, 1) == [3]


def test_who_cannot_be_asked_now_keeps_only_its_own_unread(fake_broker, make_consumer):
    append(fake_broker, 0, 1)
    other = FakeBroker({"t": 3})
    try:
        other.leader_epochs[T1] = 0
        other.append("t", 1, batch_of(b"10"))
        fake_broker.led_elsewhere[T1] = other.address
        consumer = make_consumer()
        consumer.assign([T0, T1])
        assert sorted(values(consumer, 3)) == [0, 1, 10]
        fake_broker.leader_epochs[T1] = other.leader_epochs[T1] = 1
        other.append("t", 1, batch_of(b"11"))
        other.answer_with(ASK, *[lambda request: CLOSE] * 2)
        append(fake_broker, 2)
        assert sorted(values(consumer, 2)) == [2, 11]
        assert len(other.seen(ASK)) == 3  # nothing was read before it had answered
    finally:
        other.close()


def test_a_leader_that_is_nowhere_keeps_only_its_own_unread(fake_broker, make_consumer):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    consumer.assign([T0, T1])
    fake_broker.append("t", 1, batch_of(b"10"))
    assert sorted(values(consumer, 3)) == [0, 1, 10]
    # It has moved to a broker that is down, and whoever answers now knows neither.
    consumer._lookup.epochs.lead(T1, 99, 5, bytes(16))
    fake_broker.answer_with(ApiKey.FETCH, lambda request: CLOSE)
    append(fake_broker, 2)
    assert values(consumer, 1) == [2]


def test_a_topic_made_again_where_topics_have_no_ids_is_read_in_the_end(
    fake_broker, make_consumer, caplog
):
    fake_broker.leader_epochs[T0] = 7
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    fake_broker.leader_epochs[T0] = 0
    fake_broker.logs[T0], fake_broker.ends[T0] = [], 0
    append(fake_broker, 10, 11, 12)
    assert values(consumer, 1) == [12]
    assert caplog.text.count("going on with epoch 0") == 1


def test_a_lookup_that_fails_leaves_what_was_lost_known(fake_broker, make_consumer):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    epochs = consumer._lookup.epochs
    lost = LogTruncationError(T0, 2)
    refused = ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name="t",
                partitions=[
                    ListOffsetsPartitionResponse(
                        partition_index=0,
                        error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                    )
                ],
            )
        ]
    )
    fake_broker.answer_with(ApiKey.LIST_OFFSETS, lambda request: refused)
    with pytest.raises(ApiError):
        consumer._lookup.offset_after(lost)
    assert epochs.before(T0, 2) == 0
    assert consumer._lookup.offset_after(lost) == 0
    assert epochs.before(T0, 2) == NO_EPOCH


def test_what_is_assigned_no_more_is_forgotten(fake_broker, make_consumer):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    consumer.assign([T1])
    assert consumer._lookup.epochs.before(T0, 2) == NO_EPOCH


def test_a_stored_position_is_of_its_epoch_only_for_who_goes_there(
    bootstrap, topic_name
):
    where = TopicPartition(topic_name, 0)
    settings = {
        "bootstrap_servers": bootstrap,
        "group_id": topic_name,
        "auto_offset_reset": "earliest",
    }
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        cluster.topic(topic_name, auto_create=True)
    fill(bootstrap, topic_name, range(3))
    with Consumer(**settings) as consumer:
        consumer.assign([where])
        assert values(consumer, 3) == [0, 1, 2]
    with Consumer(**settings) as consumer:
        consumer.assign([where])
        epochs = consumer._lookup.epochs
        assert consumer.committed(where) == 3
        assert epochs.before(where, 3) == NO_EPOCH
        assert consumer.position(where) == 3
        assert epochs.before(where, 3) == 0


@pytest.mark.parametrize("how", ["refuses", "is old", "names another partition"])
def test_a_leader_that_says_nothing_about_epochs_is_read_all_the_same(
    fake_broker, make_consumer, how
):
    def answer(request):
        return OffsetForLeaderEpochResponse(
            topics=[
                OffsetForLeaderTopicResult(
                    topic="t",
                    partitions=[
                        EndOfEpoch(
                            error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
                            if how == "refuses"
                            else 0,
                            partition=0 if how == "refuses" else 2,
                            leader_epoch=0,
                            end_offset=0,
                        )
                    ],
                )
            ]
        )

    if how == "is old":
        fake_broker.max_versions[ASK] = 2
    else:
        fake_broker.answer_with(ASK, answer)
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    fake_broker.elect("t", 0, end=2)
    append(fake_broker, 2)
    assert values(consumer, 1) == [2]
    assert bool(fake_broker.seen(ASK)) is (how != "is old")


# -- what is remembered ----------------------------------------------------------------


def test_an_answer_that_is_older_than_what_is_known_changes_nothing():
    epochs = PositionEpochs()
    assert epochs.lead(T0, 1, 5, ID) == 1
    assert epochs.lead(T0, 2, 4, ID) == 1
    assert epochs.leader_epoch(T0) == 5
    assert epochs.lead(T0, 2, 6, ID) == 2
    assert epochs.lead(T0, 3, NO_EPOCH, ID) == 3  # of a broker that does not tell


def test_another_topic_of_the_same_name_begins_anew():
    epochs = PositionEpochs()
    epochs.lead(T0, 1, 5, ID)
    epochs.note(T0, 0, 10, 5)
    assert epochs.lead(T0, 2, 0, OTHER_ID) == 2
    assert epochs.leader_epoch(T0) == 0
    assert epochs.before(T0, 10) == NO_EPOCH


def test_a_topic_that_gets_an_id_is_another():
    epochs = PositionEpochs()
    epochs.lead(T0, 1, 5, bytes(16))
    epochs.note(T0, 0, 10, 5)
    assert epochs.lead(T0, 2, 0, ID) == 2
    assert epochs.before(T0, 10) == NO_EPOCH
    epochs.lead(T0, 2, 1, ID)
    epochs.lead(T0, 2, 1, bytes(16))  # of an older broker
    assert epochs.lead(T0, 1, 0, ID) == 2


def test_news_that_are_older_are_believed_only_if_the_leader_has_refused_often():
    epochs = PositionEpochs()
    epochs.lead(T0, 1, 5, bytes(16))
    for _ in range(2):
        for _ in range(4):
            epochs.refuse(T0)
            assert epochs.lead(T0, 2, 0, bytes(16)) == 1
        assert epochs.lead(T0, 1, 5, bytes(16)) == 1  # counted anew
    for _ in range(5):
        epochs.refuse(T0)
    assert epochs.lead(T0, 2, 0, bytes(16)) == 2
    assert epochs.leader_epoch(T0) == 0


def test_what_is_read_again_is_of_the_leader_who_wrote_it_last():
    epochs = PositionEpochs()
    epochs.note(T0, 0, 10, 0)
    epochs.note(T0, 4, 6, 3)
    assert [epochs.before(T0, offset) for offset in (4, 5, 6, 7)] == [0, 3, 3, NO_EPOCH]
    epochs.note(T0, 0, 5, 0)
    assert [epochs.before(T0, offset) for offset in (5, 6)] == [0, NO_EPOCH]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 10), st.integers(0, 30), st.booleans()
        ),
        max_size=40,
    )
)
def test_whatever_leaders_lose_what_is_read_has_the_epoch_that_it_had(steps):
    epochs = PositionEpochs()
    log: list[int] = []  # the epoch of each record
    seen: dict[int, int] = {}  # that of each record when it was read last
    for number, (start, count, kept, elects) in enumerate(steps):
        if elects:
            log = log[:kept] + [number] * count
        first, end = min(start, len(log)), min(start + count, len(log))
        for at in range(first, end):  # a batch each
            epochs.note(T0, at, at + 1, log[at])
            seen[at] = log[at]
            assert epochs.before(T0, at + 1) == log[at]
        for at in range(45):
            found = epochs.before(T0, at + 1)
            assert found in (NO_EPOCH, seen.get(at))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), max_size=30))
def test_the_epoch_before_an_offset_is_that_of_the_record_before(batches):
    epochs = PositionEpochs()
    written = []  # the epoch of each record
    epoch = 0
    for count, rise in batches:
        epoch += rise
        epochs.note(T0, len(written), len(written) + count, epoch)
        written += [epoch] * count
    for offset in range(len(written) + 2):
        found = epochs.before(T0, offset)
        if not 0 < offset <= len(written):
            assert found == NO_EPOCH
        elif epoch - written[offset - 1] < 8:
            assert found == written[offset - 1]
        else:
            assert found == NO_EPOCH  # so long ago that it is forgotten
