"""The hand-written Produce is the table-driven one, or stands back."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fast_produce import encode_single_answer, parse_single_produce
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)

versions = st.integers(3, 12)
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=130)


def single_request(
    name: str, partition: int, records: bytes | None, acks: int
) -> ProduceRequest:
    data = PartitionProduceData(index=partition, records=records)
    return ProduceRequest(
        acks=acks,
        timeout_ms=30_000,
        topic_data=[TopicProduceData(name=name, partition_data=[data])],
    )


@given(versions, names, st.integers(0, 2**31 - 1), st.binary(max_size=300))
def test_a_request_for_one_partition_reads_as_by_the_table(
    version: int, name: str, partition: int, records: bytes
) -> None:
    body = single_request(name, partition, records, -1).encode(version)
    single = parse_single_produce(version, memoryview(body))
    if len(name.encode()) < 127 and (name or version < 9):
        assert single is not None
        assert (single.acks, single.timeout_ms) == (-1, 30_000)
        assert (single.topic, single.partition) == (name, partition)
        assert bytes(single.records) == records
    elif single is not None:
        assert single.topic == name


@settings(max_examples=300)
@given(versions, st.binary(max_size=60), st.data())
def test_what_the_table_refuses_is_never_read(
    version: int, noise: bytes, data: st.DataObject
) -> None:
    body = bytearray(single_request("topic", 1, b"records", 1).encode(version))
    at = data.draw(st.integers(0, len(body)))
    body[at : at + len(noise) // 2] = noise
    single = parse_single_produce(version, memoryview(body))
    if single is None:
        return
    message = ProduceRequest.decode(version, memoryview(body))
    (topic,) = message.topic_data
    (partition,) = topic.partition_data
    assert message.transactional_id is None
    assert (topic.name, partition.index) == (single.topic, single.partition)
    assert bytes(partition.records or b"") == bytes(single.records)


@given(versions, st.binary(max_size=80))
def test_any_bytes_are_read_by_both_or_left_to_the_table(
    version: int, noise: bytes
) -> None:
    if parse_single_produce(version, memoryview(noise)) is not None:
        ProduceRequest.decode(version, memoryview(noise))
    else:
        with suppress(ProtocolError):
            ProduceRequest.decode(version, memoryview(noise))


def test_a_transaction_two_topics_or_two_partitions_are_left_to_the_table() -> None:
    one = PartitionProduceData(index=0, records=b"x")
    for request in (
        ProduceRequest(
            transactional_id="t",
            acks=1,
            topic_data=[TopicProduceData(name="a", partition_data=[one])],
        ),
        ProduceRequest(
            acks=1, topic_data=[TopicProduceData(name="a", partition_data=[one, one])]
        ),
        ProduceRequest(
            acks=1, topic_data=[TopicProduceData(name="a", partition_data=[one])] * 2
        ),
        ProduceRequest(acks=1),
        single_request("a", 0, None, 1),
    ):
        for version in range(3, 13):
            body = memoryview(request.encode(version))
            assert parse_single_produce(version, body) is None


@given(versions, st.text(max_size=100), st.integers(0, 2**31 - 1), int64, int64, int64)
def test_an_answer_is_the_tables_byte_for_byte(
    version: int, name: str, partition: int, base: int, appended: int, start: int
) -> None:
    answer = PartitionProduceResponse(
        index=partition,
        base_offset=base,
        log_append_time_ms=appended,
        log_start_offset=start,
    )
    topic = TopicProduceResponse(name=name, partition_responses=[answer])
    if len(name.encode()) < 127:
        assert encode_single_answer(
            version, name, partition, base, appended, start
        ) == ProduceResponse(responses=[topic]).encode(version)
