"""`RecordSender` and `RecordFetcher` against a broker that also misbehaves."""

import socket

import pytest

from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError, RecordsNotWrittenError
from mpbroker.client.record_fetcher import (
    LeaderLostError,
    OffsetOutOfRangeError,
    RecordFetcher,
)
from mpbroker.client.record_sender import RecordSender
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.compression import Codec
from mpbroker.protocol.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
)
from mpbroker.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
)
from mpbroker.protocol.record_batch import (
    RecordBatchBuilder,
    iter_records,
    parse_batch_header,
)
from tests.client.fake_broker import CLOSE

T0 = TopicPartition("t", 0)


def batch_of(*values, **options):
    builder = RecordBatchBuilder(**options)
    for value in values:
        builder.append(1000, None, value)
    return builder.build()


def records_of(broker, partition=0):
    return [
        record
        for batch in broker.logs["t", partition]
        for record in iter_records(batch)
    ]


def values_of(broker, partition=0):
    return [record.value for record in records_of(broker, partition)]


def refusal(code, *record_errors, message=None):
    return lambda request: ProduceResponse(
        responses=[
            TopicProduceResponse(
                name="t",
                partition_responses=[
                    PartitionProduceResponse(
                        index=data.index,
                        error_code=code,
                        base_offset=-1,
                        error_message=message,
                        record_errors=list(record_errors),
                    )
                    for data in request.topic_data[0].partition_data
                ],
            )
        ]
    )


@pytest.mark.parametrize("codec", list(Codec))
def test_records_arrive_as_they_were_given_in_one_batch(fake_broker, cluster, codec):
    sender = RecordSender(cluster, "t", codec=codec)
    for number in range(500):
        key = b"k\0%d" % number
        sender.append(1, 1000 + number, key, None, (("h", b"\xff"), ("n", None)))
    sender.flush()
    (batch,) = fake_broker.logs["t", 1]
    assert parse_batch_header(batch).codec == codec
    records = records_of(fake_broker, 1)
    assert [record.key for record in records] == [b"k\0%d" % n for n in range(500)]
    assert [record.timestamp for record in records] == list(range(1000, 1500))
    assert {record.value for record in records} == {None}
    assert records[0].headers == [("h", b"\xff"), ("n", None)]
    assert sender.written == 500


def test_one_request_carries_the_batches_of_all_partitions(fake_broker, cluster):
    sender = RecordSender(cluster, "t")
    for number in range(30):
        sender.append(number % 3, 0, None, b"%d" % number)
    sender.flush()
    assert len(fake_broker.seen(ApiKey.PRODUCE)) == 1
    assert values_of(fake_broker, 2) == [b"%d" % n for n in range(2, 30, 3)]


def test_no_batch_grows_beyond_its_limit_except_for_one_large_record(
    fake_broker, cluster
):
    sender = RecordSender(cluster, "t", batch_bytes=1000)
    for size in [10, 900, 100, 5000, 1, 300, 300, 300, 300]:
        sender.append(0, 0, b"k" * (size // 2), b"v" * (size - size // 2))
    sender.flush()
    for batch in fake_broker.logs["t", 0]:
        assert len(batch) <= 1000 or parse_batch_header(batch).record_count == 1
    assert len(fake_broker.logs["t", 0]) < 9
    assert sum(map(len, values_of(fake_broker))) == 5 + 450 + 50 + 2500 + 1 + 4 * 150


def test_sequences_count_records_by_partition(fake_broker, cluster):
    sender = RecordSender(cluster, "t", batch_bytes=1)
    for partition in (0, 1, 0, 0):
        sender.append(partition, 0, None, b"x")
    sender.flush()
    headers = [parse_batch_header(batch) for batch in fake_broker.logs["t", 0]]
    assert [header.base_sequence for header in headers] == [0, 1, 2]
    assert {header.producer_id for header in headers} == {4000}


@pytest.mark.parametrize(
    "code", [ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT]
)
def test_a_retriable_refusal_is_sent_again_unchanged(fake_broker, cluster, code):
    fake_broker.answer_with(ApiKey.PRODUCE, refusal(code))
    sender = RecordSender(cluster, "t")
    sender.append(0, 0, None, b"x")
    sender.flush()
    first, second = fake_broker.seen(ApiKey.PRODUCE)
    assert first == second
    assert values_of(fake_broker) == [b"x"]
    assert sender.written == 1


def test_a_lost_connection_is_made_again_and_the_same_batch_sent(fake_broker, cluster):
    fake_broker.answer_with(ApiKey.PRODUCE, lambda request: CLOSE)
    sender = RecordSender(cluster, "t")
    sender.append(0, 0, None, b"x")
    sender.flush()
    first, second = fake_broker.seen(ApiKey.PRODUCE)
    assert first == second
    assert sender.written == 1


def test_a_duplicate_sequence_counts_as_written(fake_broker, cluster):
    fake_broker.answer_with(
        ApiKey.PRODUCE, refusal(ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
    )
    sender = RecordSender(cluster, "t")
    sender.append(0, 0, None, b"x")
    sender.flush()
    assert sender.written == 1


def test_without_a_producer_id_a_lost_answer_is_an_error_not_a_second_write(
    fake_broker, cluster
):
    fake_broker.answer_with(ApiKey.PRODUCE, lambda request: CLOSE)
    sender = RecordSender(cluster, "t", acks=1)
    sender.append(0, 0, None, b"x")
    with pytest.raises(BrokerUnavailableError, match="not known whether the last"):
        sender.flush()
    assert len(fake_broker.seen(ApiKey.PRODUCE)) == 1


def test_a_refusal_names_partition_records_code_and_the_brokers_words(
    fake_broker, cluster
):
    fake_broker.answer_with(
        ApiKey.PRODUCE,
        refusal(
            ErrorCode.INVALID_RECORD,
            BatchIndexAndErrorMessage(
                batch_index=1, batch_index_error_message="key needed"
            ),
            message="one or more records were rejected",
        ),
    )
    sender = RecordSender(cluster, "t")
    for _ in range(3):
        sender.append(2, 0, None, b"x")
    with pytest.raises(RecordsNotWrittenError) as caught:
        sender.flush()
    assert str(caught.value) == (
        "t partition 2: 3 records (of numbers 1-3 of the input) not written:"
        " INVALID_RECORD: one or more records were rejected\n"
        "  record 2 of the batch: key needed"
    )
    assert sender.written == 0


def test_acks_0_waits_for_no_answer(fake_broker, cluster):
    sender = RecordSender(cluster, "t", acks=0)
    sender.append(0, 0, None, b"x")
    sender.flush()
    cluster.metadata([])  # answered after the produce
    assert values_of(fake_broker) == [b"x"]


def test_an_unknown_topic_is_an_api_error(cluster):
    with pytest.raises(ApiError) as caught:
        RecordSender(cluster, "nope")
    assert caught.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# -- fetching --------------------------------------------------------------------------


def fetcher(cluster, positions, **options):
    cluster.metadata([])
    return RecordFetcher(cluster, positions, dict.fromkeys(positions, 7), **options)


def fetched_values(batches):
    return [r.value for batch in batches for r in iter_records(batch.data)]


def test_all_partitions_are_fetched_in_one_request(fake_broker, cluster):
    for partition in range(3):
        fake_broker.append("t", partition, batch_of(b"%d" % partition))
    positions = {TopicPartition("t", partition): 0 for partition in range(3)}
    batches = fetcher(cluster, positions).fetch()
    assert sorted(fetched_values(batches)) == [b"0", b"1", b"2"]
    assert len(fake_broker.seen(ApiKey.FETCH)[0].topics[0].partitions) == 3


def test_the_next_fetch_is_under_way_before_the_batches_are_used(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a", b"b"))
    reader = fetcher(cluster, {T0: 0})
    reader.fetch()
    cluster.metadata([])  # answered after what was sent before it
    offsets = [
        request.topics[0].partitions[0].fetch_offset
        for request in fake_broker.seen(ApiKey.FETCH)
    ]
    assert offsets == [0, 2]


def test_a_position_inside_a_batch_is_told_with_it(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a", b"b", b"c"))
    (batch,) = fetcher(cluster, {T0: 1}).fetch()
    assert batch.first_offset == 1
    assert batch.header.last_offset == 2


def test_a_corrupt_batch_is_not_handed_over(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"good"))
    bad = bytearray(batch_of(b"bad"))
    bad[-1] ^= 1
    fake_broker.append("t", 0, bytes(bad))
    reader = fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"good"]
    with pytest.raises(ProtocolError, match="batch at offset 1 is corrupt"):
        reader.fetch()


def test_an_error_of_one_partition_does_not_lose_what_another_gave(
    fake_broker, cluster
):
    fake_broker.append("t", 0, batch_of(b"a"))
    reader = fetcher(cluster, {T0: 0, TopicPartition("t", 1): 99})
    assert fetched_values(reader.fetch()) == [b"a"]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        reader.fetch()
    assert caught.value.partition == TopicPartition("t", 1)
    reader.positions[TopicPartition("t", 1)] = 0
    fake_broker.append("t", 0, batch_of(b"b"))
    assert fetched_values(reader.fetch()) == [b"b"]


def answer_for(code=0, records=b"", aborted=None):
    return lambda request: FetchResponse(
        responses=[
            FetchableTopicResponse(
                topic="t",
                partitions=[
                    PartitionData(
                        partition_index=0,
                        error_code=code,
                        high_watermark=100,
                        aborted_transactions=aborted,
                        records=records,
                    )
                ],
            )
        ]
    )


def test_a_leader_that_is_none_any_more_is_told(fake_broker, cluster):
    fake_broker.answer_with(ApiKey.FETCH, answer_for(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    with pytest.raises(LeaderLostError):
        fetcher(cluster, {T0: 0}).fetch()


def test_aborted_transactions_and_control_batches_are_left_out(fake_broker, cluster):
    for batch in [
        batch_of(b"plain"),
        batch_of(b"aborted", producer_id=1, producer_epoch=0, transactional=True),
        batch_of(b"committed", producer_id=2, producer_epoch=0, transactional=True),
        build_end_transaction_marker(1, 0, EndTransactionMarker(False, 0), 0),
        build_end_transaction_marker(2, 0, EndTransactionMarker(True, 0), 0),
        batch_of(b"later", producer_id=1, producer_epoch=0, transactional=True),
    ]:
        fake_broker.append("t", 0, batch)
    records = b"".join(fake_broker.logs["t", 0])
    aborted = [AbortedTransaction(producer_id=1, first_offset=1)]
    fake_broker.answer_with(ApiKey.FETCH, answer_for(records=records, aborted=aborted))
    reader = fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"plain", b"committed", b"later"]
    assert reader.positions[T0] == 6


def test_a_batch_that_the_answer_cut_off_is_fetched_again(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a"))
    fake_broker.append("t", 0, batch_of(b"b"))
    whole = b"".join(fake_broker.logs["t", 0])
    fake_broker.answer_with(ApiKey.FETCH, answer_for(records=whole[:-3]))
    reader = fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"a"]
    assert reader.positions[T0] == 1
    assert fetched_values(reader.fetch()) == [b"b"]


# -- the cluster -----------------------------------------------------------------------


def test_an_advertised_address_that_is_wrong_is_blamed_on_the_setting(fake_broker):
    with socket.create_server(("127.0.0.1", 0)) as server:
        wrong = server.getsockname()[1]
    fake_broker.append("t", 0, batch_of(b"a"))
    with Cluster([fake_broker.address], timeout_s=5) as cluster:
        sound = fake_broker.address
        fake_broker.address = sound._replace(port=wrong)
        cluster.metadata(["t"])
        with pytest.raises(BrokerUnavailableError, match=r"advertised\.listeners"):
            cluster.broker(7)
        assert str(sound) != str(fake_broker.address)
