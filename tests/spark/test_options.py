"""Options mean what they mean to Spark's connector, or are refused with the reason."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.addresses import Address
from mpbroker.client.cluster import TopicPartition
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    OffsetRequest,
    OptionError,
    parse_source_options,
)

NEEDED = {"kafka.bootstrap.servers": "h:9092", "subscribe": "t"}


def parse(streaming=False, **options):
    given_options = NEEDED | {key.replace("__", "."): v for key, v in options.items()}
    return parse_source_options(
        {key: value for key, value in given_options.items() if value is not None},
        streaming=streaming,
    )


def test_defaults_are_those_of_sparks_connector():
    batch, stream = parse(), parse(streaming=True)
    assert batch.bootstrap == (Address("h", 9092),)
    assert batch.starting == OffsetRequest(everywhere=EARLIEST)
    assert batch.ending == OffsetRequest(everywhere=LATEST)
    assert stream.starting == OffsetRequest(everywhere=LATEST)
    assert stream.fail_on_data_loss
    assert not stream.include_headers
    assert stream.max_trigger_delay_ms == 15 * 60_000
    assert stream.fetch_retries == 3


def test_names_come_in_any_case():
    assert parse(MAXOFFSETSPERTRIGGER="7").max_offsets_per_trigger == 7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": " a, b ,"}, (("a", "b"), None, ())),
        ({"subscribe": None, "subscribePattern": "a.*"}, ((), "a.*", ())),
        (
            {"subscribe": None, "assign": '{"b":[1],"a":[2,0,0]}'},
            (
                (),
                None,
                (
                    TopicPartition("a", 0),
                    TopicPartition("a", 2),
                    TopicPartition("b", 1),
                ),
            ),
        ),
    ],
)
def test_what_is_read_is_named_in_one_of_three_ways(options, expected):
    assert parse(**options).subscription == expected


def test_offsets_and_timestamps_are_read_by_partition_and_a_timestamp_for_all_wins():
    assert parse(startingOffsets='{"t":{"0":5,"1":-2}}').starting == OffsetRequest(
        offsets={TopicPartition("t", 0): 5, TopicPartition("t", 1): EARLIEST}
    )
    timestamps = '{"t":{"0":1700}}'
    assert parse(
        startingOffsetsByTimestamp=timestamps, startingOffsets="earliest"
    ).starting == OffsetRequest(timestamps={TopicPartition("t", 0): 1700})
    assert parse(
        startingOffsetsByTimestamp=timestamps, startingTimestamp="9"
    ).starting == OffsetRequest(timestamp_ms=9)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("30s", 30_000), ("5", 5), ("1d", 86_400_000), ("5000us", 5)],
)
def test_a_delay_has_a_unit(text, ms):
    assert parse(streaming=True, maxTriggerDelay=text).max_trigger_delay_ms == ms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kafka__bootstrap__servers": None}, "kafka.bootstrap.servers is not set"),
        ({"kafka__bootstrap__servers": "h:x"}, "kafka.bootstrap.servers: .*h:x"),
        ({"subscribe": None}, "exactly one of .* none is given"),
        ({"subscribePattern": "x"}, "subscribe, subscribepattern are given"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribe": None, "subscribePattern": "("}, "no regular expression"),
        ({"subscribe": None, "assign": '{"t":["0"]}'}, "assign=.* looks like"),
        ({"subscribe": None, "assign": "t"}, "assign=.* looks like"),
        ({"startingOffsets": "latest"}, "must not be latest in a batch"),
        ({"startingOffsets": '{"t":{"0":-1}}'}, "must not be latest in a batch"),
        ({"endingOffsets": "earliest"}, "endingOffsets must not be earliest"),
        ({"startingOffsets": "nowhere"}, "startingOffsets='nowhere' cannot be read"),
        ({"startingOffsets": '{"t":{"0":-3}}'}, "startingOffsets=.* cannot be read"),
        ({"startingOffsets": '{"t":[1]}'}, "startingOffsets=.* cannot be read"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp='yesterday' is not"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger='0' .* at least 1"),
        ({"minPartitions": "many"}, "minPartitions='many'"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss='maybe'"),
        ({"maxTriggerDelay": "1 fortnight"}, "maxTriggerDelay='1 fortnight'"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "'guess' is none of"),
        ({"kafka__isolation__level": "none"}, "'none' is none of"),
        ({"kafka__auto__offset__reset": "latest"}, "use startingOffsets"),
        ({"kafka__enable__auto__commit": "true"}, "checkpoint"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_value(options, message):
    with pytest.raises(OptionError, match=f"(?s){message}"):
        parse(**options)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp"])
def test_a_stream_has_no_end(name):
    with pytest.raises(OptionError, match="not valid in streaming"):
        parse(streaming=True, **{name: "5"})


def test_a_batch_that_could_never_be_large_enough_is_refused():
    found = parse(streaming=True, minOffsetsPerTrigger="7", maxOffsetsPerTrigger="7")
    assert found.min_offsets_per_trigger == found.max_offsets_per_trigger == 7
    message = "minOffsetsPerTrigger=8 is greater than maxOffsetsPerTrigger=7"
    with pytest.raises(OptionError, match=message):
        parse(streaming=True, minOffsetsPerTrigger="8", maxOffsetsPerTrigger="7")


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "startingOffsets",
                "endingOffsets",
                "assign",
                "subscribePattern",
                "maxTriggerDelay",
                "startingTimestamp",
                "kafka.bootstrap.servers",
            ]
        ),
        st.text(max_size=30) | st.sampled_from(["{}", '{"t":{}}', '{"t":null}', "-1"]),
    ),
    st.booleans(),
)
def test_any_text_is_understood_or_an_option_error(options, streaming):
    try:
        parse_source_options(NEEDED | options, streaming=streaming)
    except OptionError as error:
        assert str(error)


def test_how_connections_are_secured_travels_to_executors():
    options = parse(
        kafka__security__protocol="SASL_SSL",
        kafka__sasl__mechanism="SCRAM-SHA-512",
        kafka__sasl__username="alice",
        kafka__sasl__password="secret",
        kafka__ssl__truststore__location="/etc/ca.pem",
    )
    there = pickle.loads(pickle.dumps(options)).client
    assert (there.security.protocol, there.security.username) == ("SASL_SSL", "alice")
    assert there.security.values["ssl.truststore.location"] == "/etc/ca.pem"
    with pytest.raises(OptionError, match=r"kafka\.sasl\.mechanism=PLAIN needs"):
        parse(kafka__security__protocol="SASL_SSL", kafka__sasl__mechanism="PLAIN")
