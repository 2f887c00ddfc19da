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
from mpbroker.client.consumer import Consumer, LogTruncationError
from mpbroker.client.position_epochs import NO_EPOCH, PositionEpochs
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.fetch import EpochEndOffset
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
from tests.client.test_consumer import fill, values
from tests.client.test_fetcher import answer_for, batch_of

T0 = TopicPartition("t", 0)
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


def test_questions_carry_the_leaders_epoch_and_that_of_what_was_read(
    fake_broker, make_consumer
):
    fake_broker.leader_epochs[T0] = 3
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    assert asked(fake_broker, ApiKey.LIST_OFFSETS).current_leader_epoch == 3
    first = fake_broker.seen(ApiKey.FETCH)[0].topics[0].partitions[0]
    assert (first.current_leader_epoch, first.last_fetched_epoch) == (3, NO_EPOCH)
    consumer.poll(1)
    assert epochs_asked(fake_broker) == (3, 3)


def test_who_seeks_says_nothing_of_what_it_did_not_read(fake_broker, make_consumer):
    append(fake_broker, 0, 1, 2, 3)
    consumer = make_consumer()
    assert values(consumer, 4)
    fake_broker.logs[T0] = []  # so that what comes next is what is asked for next
    fake_broker.ends[T0] = 100
    consumer.seek(T0, 50)
    consumer.poll(1)
    consumer.poll(1)
    assert asked(fake_broker).fetch_offset == 50
    assert epochs_asked(fake_broker) == (0, NO_EPOCH)


@pytest.mark.parametrize(
    ("api", "highest", "expected"),
    [(ApiKey.METADATA, 8, (NO_EPOCH, 0)), (ApiKey.FETCH, 11, (0, NO_EPOCH))],
)
def test_older_brokers_are_told_what_they_can_take(
    fake_broker, make_consumer, api, highest, expected
):
    fake_broker.max_versions[api] = highest
    append(fake_broker, 0)
    consumer = make_consumer()
    assert values(consumer, 1) == [0]
    consumer.poll(1)
    assert epochs_asked(fake_broker) == expected


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
    assert epochs_asked(fake_broker) == (1, 1)


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


def test_a_leader_that_knows_nothing_of_the_epoch_is_read_by_the_rule_for_resets(
    fake_broker, make_consumer
):
    append(fake_broker, 0, 1)
    consumer = make_consumer()
    assert values(consumer, 2) == [0, 1]
    fake_broker.elect("t", 0, end=0)
    append(fake_broker, 10, 11, 12)
    assert values(consumer, 3) == [10, 11, 12]


def test_what_an_answer_to_a_fetch_says_of_a_loss_is_believed(
    fake_broker, make_consumer
):
    append(fake_broker, 0, 1, 2)
    consumer = make_consumer()
    assert values(consumer, 3) == [0, 1, 2]

    def diverging(request):
        answer = answer_for()(request)
        (data,) = answer.responses[0].partitions
        data.diverging_epoch = EpochEndOffset(epoch=0, end_offset=1)
        return answer

    fake_broker.answer_with(ApiKey.FETCH, diverging)
    assert values(consumer, 2) == [1, 2]


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
