"""Which offsets a stream's next batch ends at, asked of the reader without Spark."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ApiError
from mpbroker.spark import offsets, readers
from mpbroker.spark.offsets import DataLossError
from mpbroker.spark.options import OptionError, parse_source_options
from mpbroker.spark.readers import BatchReader, StreamReader
from tests.client.fake_broker import CLOSE, FakeBroker
from tests.client.test_fetcher import batch_of
from tests.spark.topic_records import going_transactions, offsets_in, topic_records
from tests.support.children import wait_until

ALL = ReadAllAvailable()


@pytest.fixture
def reader(bootstrap):
    """Return a reader that begins at the start of its topics."""
    made = []

    def make(**options):
        given = {
            "kafka.bootstrap.servers": bootstrap,
            "startingOffsets": "earliest",
            **options,
        }
        made.append(StreamReader(parse_source_options(given, streaming=True)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def put(bootstrap):
    def write(topic, count, partition=0):
        producer = Producer({"bootstrap.servers": bootstrap})
        for number in range(count):
            producer.produce(topic, b"%d" % number, partition=partition)
        assert producer.flush(60) == 0

    return write


@pytest.fixture
def admin(bootstrap):
    return AdminClient({"bootstrap.servers": bootstrap})


@pytest.fixture
def make_named_topic(admin):
    """Create a topic of this name; create and delete may come again."""
    names = []

    def make(name):
        # A topic of this name that is being deleted is in the way for a moment.
        def created():
            try:
                admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
            except KafkaException as error:
                assert "TOPIC_ALREADY_EXISTS" in str(error)
                return False
            return True

        wait_until(created)
        names.append(name)

    yield make
    for future in admin.delete_topics(list(set(names))).values():
        future.exception(60)


@pytest.fixture
def batch_ranges(bootstrap):
    """Plan a batch query; return what its tasks would read."""

    def ranges(**options):
        given = {"kafka.bootstrap.servers": bootstrap, **options}
        planned = BatchReader(parse_source_options(given, streaming=False))
        return [(each.range.start, each.range.end) for each in planned.partitions()]

    return ranges


def test_offsets_beyond_the_end_of_a_log_are_data_loss_or_cut_off(
    reader, batch_ranges, put, make_topic, caplog
):
    topic = make_topic()
    put(topic, 10)
    for side in ("startingOffsets", "endingOffsets"):
        beyond = {"subscribe": topic, side: f'{{"{topic}":{{"0":11}}}}'}
        message = f"{side} of {topic}-0 is 11, and the log ends at 10"
        with pytest.raises(DataLossError, match=message):
            batch_ranges(**beyond)
        caplog.clear()
        if side == "startingOffsets":
            with pytest.raises(OptionError, match="start, offset 11, is greater than"):
                batch_ranges(**beyond, failOnDataLoss="false")
        else:
            assert batch_ranges(**beyond, failOnDataLoss="false") == [(0, 10)]
        assert caplog.messages == [message]
    late = {"subscribe": topic, "startingOffsets": f'{{"{topic}":{{"0":11}}}}'}
    with pytest.raises(DataLossError, match="is 11, and the log ends at 10"):
        reader(**late).initialOffset()
    start = reader(**late, failOnDataLoss="false").initialOffset()
    assert offsets_in(start) == {topic: {"0": 10}}
    at_the_end = {"subscribe": topic, "startingOffsets": f'{{"{topic}":{{"0":10}}}}'}
    assert offsets_in(reader(**at_the_end).initialOffset()) == {topic: {"0": 10}}
    assert batch_ranges(**at_the_end) == []


def test_a_start_beyond_the_end_is_refused(batch_ranges, put, make_topic):
    topic = make_topic()
    put(topic, 10)
    for loss in ("true", "false"):
        for end in (
            {"endingOffsets": f'{{"{topic}":{{"0":2}}}}'},
            {"endingTimestamp": "1"},
        ):
            with pytest.raises(
                OptionError, match="start, offset 5, is greater than the"
            ):
                batch_ranges(
                    subscribe=topic,
                    startingOffsets=f'{{"{topic}":{{"0":5}}}}',
                    failOnDataLoss=loss,
                    **end,
                )


@pytest.fixture
def clock(monkeypatch):
    """Give the readers a clock that stands still: add to ``now``."""
    found = SimpleNamespace(now=0.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(readers, "time", found)
    return found


@pytest.mark.usefixtures("clock")
def test_too_few_offsets_wait_for_more(reader, put, make_topic):
    topic = make_topic()
    patient = reader(subscribe=topic, minOffsetsPerTrigger="100", maxTriggerDelay="10h")
    put(topic, 10)
    start = patient.latestOffset(patient.initialOffset(), ALL)
    assert offsets_in(start) == {topic: {"0": 10}}, "the first batch waits for nothing"
    put(topic, 60)
    assert patient.latestOffset(start, ALL) == start
    put(topic, 40)
    assert offsets_in(patient.latestOffset(start, ALL)) == {topic: {"0": 110}}


def test_too_few_offsets_wait_no_longer_than_the_delay(reader, put, make_topic, clock):
    topic = make_topic()
    hasty = reader(subscribe=topic, minOffsetsPerTrigger="100", maxTriggerDelay="15m")
    put(topic, 1)
    start = hasty.latestOffset(hasty.initialOffset(), ALL)
    put(topic, 1)
    clock.now += 15 * 60 - 1
    assert hasty.latestOffset(start, ALL) == start
    clock.now += 1
    assert offsets_in(hasty.latestOffset(start, ALL)) == {topic: {"0": 2}}


@pytest.mark.usefixtures("clock")
def test_a_restart_does_not_begin_the_delay_anew(reader, put, make_topic):
    topic = make_topic()
    options = {"minOffsetsPerTrigger": "100", "maxTriggerDelay": "15m"}
    put(topic, 5)
    first = reader(subscribe=topic, **options)
    start = first.latestOffset(first.initialOffset(), ALL)
    # Nothing is there at first: that begins no delay, either.
    again = reader(subscribe=topic, **options)
    assert again.latestOffset(start, ALL) == start
    put(topic, 5)
    assert offsets_in(again.latestOffset(start, ALL)) == {topic: {"0": 10}}


def test_available_now_is_what_was_there_when_it_began(reader, put, make_topic):
    topic = make_topic()
    put(topic, 10)
    once = reader(subscribe=topic, minOffsetsPerTrigger="1000", maxTriggerDelay="10h")
    once.prepareForTriggerAvailableNow()
    put(topic, 10)
    start = once.initialOffset()
    first = once.latestOffset(start, ReadMaxRows(6))
    assert offsets_in(first) == {topic: {"0": 6}}
    assert offsets_in(once.latestOffset(first, ReadMaxRows(6))) == {topic: {"0": 10}}
    assert once.reportLatestOffset() == {topic: {"0": 20}}


def test_topics_and_partitions_that_are_new_are_read_from_their_start(
    reader, put, make_topic, make_named_topic, admin
):
    topic = make_topic()
    stream = reader(subscribePattern=f"{topic}.*")
    put(topic, 3)
    before = stream.latestOffset(stream.initialOffset(), ALL)
    make_named_topic(f"{topic}-later")
    put(f"{topic}-later", 5)
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(60)
    put(topic, 7, partition=1)
    end = stream.latestOffset(before, ALL)
    assert offsets_in(end) == {topic: {"0": 3, "1": 7}, f"{topic}-later": {"0": 5}}
    assert [
        (str(each.range.partition), each.range.start, each.range.end)
        for each in stream.partitions(before, end)
    ] == [(f"{topic}-1", 0, 7), (f"{topic}-later-0", 0, 5)]


def test_a_pattern_finds_a_topic_by_a_part_of_its_name(reader, make_topic):
    topic = make_topic()
    for pattern in (topic[1:-1], topic, f"^{topic}$"):
        start = reader(subscribePattern=pattern).initialOffset()
        assert offsets_in(start) == {topic: {"0": 0}}
    assert reader(subscribePattern=f"^{topic[:-1]}$").initialOffset() == {}


def test_a_new_partition_without_its_first_records_is_data_loss(
    reader, put, make_topic, make_named_topic, delete_records
):
    topic = make_topic()
    options = {"subscribePattern": f"{topic}.*"}
    stream = reader(**options)
    before = stream.initialOffset()
    make_named_topic(f"{topic}-later")
    put(f"{topic}-later", 5)
    delete_records(f"{topic}-later", 0, 2)
    with pytest.raises(DataLossError, match=r"later-0 is new and starts at 2.*failOn"):
        stream.latestOffset(before, ALL)
    tolerant = reader(**options, failOnDataLoss="false")
    end = tolerant.latestOffset(before, ALL)
    (range_,) = [each.range for each in tolerant.partitions(before, end)]
    assert (range_.start, range_.end) == (2, 5)


@pytest.mark.parametrize("away", ["topic", "leader"])
@pytest.mark.parametrize("lossy", ["true", "false"])
def test_a_batch_that_comes_again_has_the_rows_of_a_partition_that_is_away(away, lossy):
    broker = FakeBroker({"t": 1})
    options = {
        "kafka.bootstrap.servers": str(broker.address),
        "subscribePattern": "^(t|u)$",
        "startingOffsets": "earliest",
        "failOnDataLoss": lossy,
    }
    stream = StreamReader(parse_source_options(options, streaming=True))
    try:
        before = stream.initialOffset()
        broker.topics = {"t": 1, "u": 1}
        broker.append("t", 0, batch_of(b"1"))
        broker.append("u", 0, batch_of(b"2", b"3"))
        end = stream.latestOffset(before, ALL)
        if away == "topic":
            broker.topics = {"t": 1}
        else:
            broker.leaderless = {("u", 0)}
        planned = stream.partitions(before, end)
        broker.topics, broker.leaderless = {"t": 1, "u": 1}, set()
        assert [
            value
            for part in planned
            for batch in stream.read(part)
            for value in batch.column("value").to_pylist()
        ] == [b"1", b"2", b"3"]
    finally:
        stream.stop()
        broker.close()


def test_a_topic_that_is_gone_is_data_loss_and_is_not_forgotten(
    reader, put, make_topic, make_named_topic, admin, caplog
):
    topic = make_topic()
    make_named_topic(f"{topic}-old")
    put(f"{topic}-old", 4)
    options = {"subscribePattern": f"{topic}.*"}
    stream = reader(**options)
    before = stream.latestOffset(stream.initialOffset(), ALL)
    admin.delete_topics([f"{topic}-old"])[f"{topic}-old"].result(60)
    message = rf"{topic}-old-0 \(read up to offset 4\).* do not exist any more"
    with pytest.raises(DataLossError, match=message):
        stream.latestOffset(before, ALL)
    put(topic, 1)
    tolerant = reader(**options, failOnDataLoss="false")
    end = tolerant.latestOffset(before, ALL)
    # Were it forgotten, and came back for metadata, it would be read twice.
    assert offsets_in(end) == {topic: {"0": 1}, f"{topic}-old": {"0": 4}}
    assert tolerant.latestOffset(end, ALL) == end
    assert caplog.text.count("do not exist any more") == 1, "told at each trigger"


@pytest.fixture
def quick(monkeypatch):
    """Let those who ask for offsets wait in no time; return their pauses."""
    found = SimpleNamespace(now=0.0, pauses=[])

    def sleep(seconds):
        found.pauses.append(seconds)
        found.now += seconds

    found.monotonic, found.sleep = lambda: found.now, sleep
    monkeypatch.setattr(offsets, "time", found)
    return found


@pytest.fixture
def fake_broker():
    broker = FakeBroker({"t": 1, "u": 1})
    yield broker
    broker.close()


@pytest.fixture
def stream_of(fake_broker):
    """Return a reader of the broker's topics, which have one record each."""
    for topic in ("t", "u"):
        fake_broker.append(topic, 0, batch_of(topic.encode()))
    made = []

    def make(**options):
        given = {
            "kafka.bootstrap.servers": str(fake_broker.address),
            "startingOffsets": "earliest",
            **(options or {"subscribe": "t,u"}),
        }
        made.append(StreamReader(parse_source_options(given, streaming=True)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_a_stream_waits_for_brokers_and_leaders_that_come_back(
    fake_broker, stream_of, quick
):
    stream = stream_of(subscribePattern="t|u")
    read = stream.initialOffset()
    fake_broker.append("t", 0, batch_of(b"2"))
    for key in (ApiKey.METADATA, ApiKey.LIST_OFFSETS):
        fake_broker.answer_with(key, *[lambda _: CLOSE] * 20)
    end = stream.latestOffset(read, ALL)
    assert offsets_in(end) == {"t": {"0": 2}, "u": {"0": 1}}
    # Of each kind there are fetchOffset.numRetries attempts at once.
    assert quick.pauses[:8] == [0.01, 0.01, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]

    fake_broker.leaderless = {("t", 0)}

    def again(_):
        fake_broker.leaderless = set()

    fake_broker.answer_with(ApiKey.METADATA, *[lambda _: None] * 9, again)
    assert stream.latestOffset(end, ALL) == end
    assert len(stream.partitions(read, end)) == 2


def test_a_stream_asks_who_leads_a_partition_now(fake_broker, stream_of, quick):
    stream = stream_of()
    read = stream.initialOffset()
    elsewhere = FakeBroker({"t": 1})
    try:
        elsewhere.append("t", 0, batch_of(b"1", b"2"))

        def moves(_):
            """Hang up: node 8 leads from now on."""
            fake_broker.led_elsewhere["t", 0] = elsewhere.address
            return CLOSE

        fake_broker.answer_with(ApiKey.LIST_OFFSETS, moves)
        end = stream.latestOffset(read, ALL)
        assert offsets_in(end) == {"t": {"0": 2}, "u": {"0": 1}}
        assert quick.pauses == [0.01]
    finally:
        elsewhere.close()


def test_a_stream_says_where_it_goes_on_when_no_broker_answers(
    fake_broker, stream_of, quick
):
    stream = stream_of()
    end = stream.latestOffset(stream.initialOffset(), ALL)
    fake_broker.answer_with(ApiKey.METADATA, *[lambda _: CLOSE] * 1_000)
    message = (
        r"waited 120 s \(kafkaConsumer.pollTimeoutMs\). Start the query again when"
        r" brokers answer: it goes on where it was, t-0 \(read up to offset 1\), u-0"
    )
    with pytest.raises(BrokerUnavailableError, match=message):
        stream.latestOffset(end, ALL)
    assert 120 <= sum(quick.pauses) <= 123
    quick.pauses.clear()
    with pytest.raises(BrokerUnavailableError):
        stream_of().initialOffset()
    assert quick.pauses == [0.01, 0.01], "a first start waits for no broker"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "subscribed", [{"subscribe": "t,u"}, {"assign": '{"t":[0],"u":[0]}'}]
)
def test_a_topic_that_is_gone_stops_no_stream_that_may_lose_data(
    fake_broker, stream_of, caplog, subscribed
):
    fail, go_on = ({**subscribed, "failOnDataLoss": each} for each in ("true", "false"))
    stream = stream_of(**go_on)
    start = stream.initialOffset()
    logged = stream.latestOffset(start, ALL)
    assert ranges_of(stream, start, logged) == [("t-0", 0, 1), ("u-0", 0, 1)]
    del fake_broker.topics["u"]
    fake_broker.append("t", 0, batch_of(b"2", b"3"))

    caplog.clear()
    for each in (stream, stream_of(**go_on)):  # while it runs, and after a restart
        assert ranges_of(each, start, logged) == [("t-0", 0, 1), ("u-0", 0, 1)]
        end = each.latestOffset(logged, ALL)
        assert offsets_in(end) == {"t": {"0": 3}, "u": {"0": 1}}
        assert ranges_of(each, logged, end) == [("t-0", 1, 3)]
    assert caplog.text.count("u-0 (read up to offset 1): the partitions do not exist")
    once = stream_of(**go_on)
    once.prepareForTriggerAvailableNow()
    assert once.latestOffset(logged, ALL) == end

    message = r"u-0 \(read up to offset 1\): .* do not exist any more.*failOnDataLoss="
    with pytest.raises(DataLossError, match=message):
        stream_of(**fail).latestOffset(logged, ALL)
    with pytest.raises(ApiError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        stream_of(**go_on).initialOffset()


@pytest.fixture
def make_again(make_named_topic, admin, put):
    """Delete a topic, if it is there, and make it again with records."""

    def make(topic, count):
        if topic in admin.list_topics(timeout=60).topics:
            admin.delete_topics([topic])[topic].result(60)
        make_named_topic(topic)
        put(topic, count)

    return make


def ranges_of(stream, start, end):
    return [
        (str(each.range.partition), each.range.start, each.range.end)
        for each in stream.partitions(start, end)
    ]


def test_a_topic_that_was_made_again_is_data_loss(reader, make_again, topic_name):
    make_again(topic_name, 4)
    stream = reader(subscribe=topic_name)
    before = stream.latestOffset(stream.initialOffset(), ALL)
    for count in (1, 4, 9):
        make_again(topic_name, count)
        again = reader(subscribe=topic_name)
        message = f"topic {topic_name} was deleted and made again.*failOnDataLoss=false"
        with pytest.raises(DataLossError, match=message):
            again.latestOffset(before, ALL)


def test_a_topic_that_was_made_again_is_told_by_its_end_where_no_id_is_known(
    reader, make_again, topic_name
):
    make_again(topic_name, 4)
    stream = reader(subscribe=topic_name)
    before = offsets_in(stream.latestOffset(stream.initialOffset(), ALL))
    make_again(topic_name, 1)
    again = reader(subscribe=topic_name)
    with pytest.raises(DataLossError, match=r"the log ends at 1, below 4.*made again"):
        again.latestOffset(before, ALL)


@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize("gap", ["a batch between", "none"])
def test_a_topic_that_was_made_again_is_read_from_its_start(
    reader, make_again, admin, topic_name, caplog, count, gap
):
    make_again(topic_name, 4)
    options = {"subscribePattern": f"^{topic_name}$", "failOnDataLoss": "false"}
    stream = reader(**options)
    before = stream.latestOffset(stream.initialOffset(), ALL)
    if gap == "a batch between":
        admin.delete_topics([topic_name])[topic_name].result(60)
        before = stream.latestOffset(before, ALL)
        assert offsets_in(before) == {topic_name: {"0": 4}}
    make_again(topic_name, count)
    caplog.clear()
    for each in (stream, reader(**options)):  # while it runs, and after a restart
        end = each.latestOffset(before, ALL)
        assert ranges_of(each, before, end) == [(f"{topic_name}-0", 0, count)]
        assert f"topic {topic_name} was deleted and made again" in caplog.text
        assert each.latestOffset(end, ALL) == end
        assert ranges_of(each, end, end) == []


def test_a_batch_of_a_topic_that_was_made_again_reads_nothing_of_the_new_one(
    reader, make_again, topic_name
):
    make_again(topic_name, 4)
    stream = reader(subscribe=topic_name)
    before = stream.initialOffset()
    end = stream.latestOffset(before, ALL)
    make_again(topic_name, 9)
    with pytest.raises(DataLossError, match="was deleted and made again"):
        reader(subscribe=topic_name).partitions(before, end)
    tolerant = reader(subscribe=topic_name, failOnDataLoss="false")
    assert ranges_of(tolerant, before, end) == []
    after = tolerant.latestOffset(end, ALL)
    assert ranges_of(tolerant, end, after) == [(f"{topic_name}-0", 0, 9)]


def test_ids_that_an_older_checkpoint_lacks_begin_no_batch(reader, put, make_topic):
    topic = make_topic()
    put(topic, 3)
    stream = reader(subscribe=topic)
    end = stream.latestOffset(stream.initialOffset(), ALL)
    older = offsets_in(end)
    assert older != end
    assert stream.latestOffset(older, ALL) == older
    put(topic, 1)
    assert stream.latestOffset(older, ALL) == stream.latestOffset(end, ALL)


def test_a_group_that_is_named_shows_how_far_the_stream_is(
    reader, put, make_topic, bootstrap
):
    topic = make_topic()
    put(topic, 9)
    stream = reader(subscribe=topic, commitGroup=f"lag-of-{topic}")
    end = stream.latestOffset(stream.initialOffset(), ALL)
    stream.commit(end)
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"lag-of-{topic}"})
    (stored,) = consumer.committed([TopicPartition(topic, 0)], timeout=60)
    consumer.close()
    assert stored.offset == 9


def test_a_group_that_cannot_be_written_stops_nothing(reader, make_topic, caplog):
    topic = make_topic()
    stream = reader(subscribe=topic, commitGroup="g")
    with caplog.at_level(logging.WARNING):
        stream.commit({f"{topic}-that-is-not-there": {"0": 1}})
    assert "commitGroup=g: offsets are not stored" in caplog.text


def test_a_group_without_a_name_is_refused(reader):
    with pytest.raises(OptionError, match="commitGroup is empty"):
        reader(subscribe="t", commitGroup=" ")


@pytest.mark.parametrize("level", ["read_uncommitted", "read_committed"])
def test_transactions_may_go_on_under_a_stream(reader, make_topic, bootstrap, level):
    topic = make_topic()
    stream = reader(subscribe=topic, **{"kafka.isolation.level": level})
    reached = stream.initialOffset()
    read = []

    def trigger():
        nonlocal reached
        end = stream.latestOffset(reached, ALL)
        for part in stream.partitions(reached, end):
            for batch in stream.read(part):
                read.extend(batch.column("offset").to_pylist())
        reached = end
        return len(read)

    with going_transactions(bootstrap, topic):
        wait_until(lambda: trigger() >= 60)
    records = topic_records(bootstrap, topic, isolation=level)
    wait_until(lambda: trigger() >= len(records))
    assert read == [each.offset() for each in records]
