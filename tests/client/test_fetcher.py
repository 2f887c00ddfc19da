"""`Fetcher` against a broker that also misbehaves."""

import socket

import pytest

from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import (
    Fetcher,
    LeaderLostError,
    OffsetOutOfRangeError,
)
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchResponse,
    PartitionData,
)
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder, iter_records

T0 = TopicPartition("t", 0)


def batch_of(*values, **options):
    builder = RecordBatchBuilder(**options)
    for value in values:
        builder.append(1000, None, value)
    return builder.build()


def make_fetcher(cluster, positions, **options):
    cluster.metadata([])
    return Fetcher(cluster, positions, dict.fromkeys(positions, 7), **options)


def fetched_values(batches):
    return [r.value for batch in batches for r in iter_records(batch.data)]


def test_all_partitions_are_fetched_in_one_request(fake_broker, cluster):
    for partition in range(3):
        fake_broker.append("t", partition, batch_of(b"%d" % partition))
    positions = {TopicPartition("t", partition): 0 for partition in range(3)}
    batches = make_fetcher(cluster, positions).fetch()
    assert sorted(fetched_values(batches)) == [b"0", b"1", b"2"]
    assert len(fake_broker.seen(ApiKey.FETCH)[0].topics[0].partitions) == 3


def test_the_next_fetch_is_under_way_before_the_batches_are_used(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a", b"b"))
    reader = make_fetcher(cluster, {T0: 0})
    reader.fetch()
    cluster.metadata([])  # answered after what was sent before it
    offsets = [
        request.topics[0].partitions[0].fetch_offset
        for request in fake_broker.seen(ApiKey.FETCH)
    ]
    assert offsets == [0, 2]


def test_a_position_inside_a_batch_is_told_with_it(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a", b"b", b"c"))
    (batch,) = make_fetcher(cluster, {T0: 1}).fetch()
    assert batch.first_offset == 1
    assert batch.header.last_offset == 2


def test_a_corrupt_batch_is_not_handed_over(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"good"))
    bad = bytearray(batch_of(b"bad"))
    bad[-1] ^= 1
    fake_broker.append("t", 0, bytes(bad))
    reader = make_fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"good"]
    with pytest.raises(ProtocolError, match="batch at offset 1 is corrupt"):
        reader.fetch()


def test_an_error_of_one_partition_does_not_lose_what_another_gave(
    fake_broker, cluster
):
    fake_broker.append("t", 0, batch_of(b"a"))
    reader = make_fetcher(cluster, {T0: 0, TopicPartition("t", 1): 99})
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
        make_fetcher(cluster, {T0: 0}).fetch()


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
    reader = make_fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"plain", b"committed", b"later"]
    assert reader.positions[T0] == 6


def test_a_batch_that_the_answer_cut_off_is_fetched_again(fake_broker, cluster):
    fake_broker.append("t", 0, batch_of(b"a"))
    fake_broker.append("t", 0, batch_of(b"b"))
    whole = b"".join(fake_broker.logs["t", 0])
    fake_broker.answer_with(ApiKey.FETCH, answer_for(records=whole[:-3]))
    reader = make_fetcher(cluster, {T0: 0})
    assert fetched_values(reader.fetch()) == [b"a"]
    assert reader.positions[T0] == 1
    assert fetched_values(reader.fetch()) == [b"b"]


# -- the cluster -----------------------------------------------------------------------


def test_an_advertised_address_that_is_wrong_is_blamed_on_the_setting(fake_broker):
    with socket.create_server(("127.0.0.1", 0)) as server:
        wrong = server.getsockname()[1]
    fake_broker.append("t", 0, batch_of(b"a"))
    with Cluster([fake_broker.address], timeout_s=30) as cluster:
        sound = fake_broker.address
        fake_broker.address = sound._replace(port=wrong)
        cluster.metadata(["t"])
        with pytest.raises(BrokerUnavailableError, match=r"advertised\.listeners"):
            cluster.broker(7)
        assert str(sound) != str(fake_broker.address)


def test_an_answer_for_a_position_that_was_left_is_not_read(fake_broker, cluster):
    for value in (b"a", b"b", b"c"):
        fake_broker.append("t", 0, batch_of(value))
    reader = make_fetcher(cluster, {T0: 0})
    reader.fetch()  # and asks for offset 3 already
    reader.positions[T0] = 1
    assert reader.fetch() == []
    assert fetched_values(reader.fetch()) == [b"b", b"c"]
