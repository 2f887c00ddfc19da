"""Clients' metrics: subscriptions, and accepted and refused pushes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.tables.client_instances import ClientInstance
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from mpbroker.protocol.messages.list_config_resources import (
    ListConfigResourcesRequest,
)
from mpbroker.protocol.messages.push_telemetry import PushTelemetryRequest
from mpbroker.protocol.records.compression import compress
from mpbroker.server.configs.client_metrics_config import (
    Client,
    Subscription,
    subscription_of,
)
from mpbroker.server.handlers.describe_configs import handle_describe_configs
from mpbroker.server.handlers.get_telemetry_subscriptions import subscribe
from mpbroker.server.handlers.incremental_alter_configs import (
    handle_incremental_alter_configs,
)
from mpbroker.server.handlers.list_config_resources import (
    handle_list_config_resources,
)
from mpbroker.server.handlers.push_telemetry import admit_push, inflate
from tests.server.contexts import context
from tests.support.metadata import start

CLIENT_METRICS = 16
SET, DELETE, APPEND, SUBTRACT = range(4)
ID = b"\1" * 16
MS = 1_000_000
WANTED = Subscription(42, ["*"], 1000)
JAVA = Client("AQ", "app-1", "apache-kafka-java", "4.1.0", "10.0.0.1", "5000")


@pytest.fixture
def registry(tmp_path):
    return start(tmp_path)


def alter(registry, name, *changes, validate_only=False):
    """Make (key, operation, value) changes; return the error's code and text."""
    configs = [
        AlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    request = IncrementalAlterConfigsRequest(
        resources=[
            AlterConfigsResource(
                resource_type=CLIENT_METRICS, resource_name=name, configs=configs
            )
        ],
        validate_only=validate_only,
    )
    (response,) = handle_incremental_alter_configs(request, context(registry)).responses
    return response.error_code, response.error_message or ""


def described(registry, name):
    request = DescribeConfigsRequest(
        resources=[
            DescribeConfigsResource(resource_type=CLIENT_METRICS, resource_name=name)
        ]
    )
    (result,) = handle_describe_configs(request, context(registry)).results
    assert result.error_code == 0
    return {each.name: (each.value, each.config_source) for each in result.configs}


def names(registry, version=0):
    request = ListConfigResourcesRequest(
        resource_types=[CLIENT_METRICS] if version else []
    )
    response = handle_list_config_resources(request, context(registry, version=version))
    return [each.resource_name for each in response.config_resources]


# -- subscriptions are resources of configs --------------------------------------------


def test_a_subscription_is_altered_described_listed_and_outlives_the_broker(
    registry, tmp_path
):
    changes = ("interval.ms", SET, "5000"), ("metrics", SET, "a.,b.")
    assert alter(registry, "mine", *changes) == (0, "")
    assert alter(registry, "mine", ("metrics", APPEND, "c.")) == (0, "")
    assert alter(registry, "mine", ("metrics", SUBTRACT, "a.")) == (0, "")
    default, own = 5, 7
    expected = {
        "metrics": ("b.,c.", own),
        "interval.ms": ("5000", own),
        "match": ("", default),
    }
    assert described(registry, "mine") == expected
    again = start(tmp_path)
    assert described(again, "mine") == expected
    assert names(again) == names(again, 1) == ["mine"]
    alter(registry, "mine", ("metrics", DELETE, None), ("interval.ms", DELETE, None))
    assert names(registry) == []


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("interval.ms", SET, "99"), E.INVALID_REQUEST, "between 100 and 3600000"),
        (("interval.ms", SET, "3600001"), E.INVALID_REQUEST, "100 and 3600000"),
        (("interval.ms", SET, "soon"), E.INVALID_REQUEST, "interval.ms=soon"),
        (("retention.ms", SET, "1"), E.INVALID_REQUEST, "retention.ms"),
        (("match", SET, "client_id"), E.INVALID_CONFIG, "NAME=PATTERN"),
        (("match", SET, "colour=blue"), E.INVALID_CONFIG, "client_software_name"),
        (("match", SET, "client_id=(a"), E.INVALID_CONFIG, "Illegal client matching"),
        (
            ("match", SET, r"client_id=(a)\1"),
            E.INVALID_CONFIG,
            "Illegal client matching",
        ),
        (("match", SET, "client_id=a" * 2000), E.INVALID_CONFIG, "22000 characters"),
    ],
)
def test_an_invalid_subscription_is_refused_and_changes_nothing(
    registry, change, code, words
):
    told, text = alter(registry, "mine", change)
    assert told == code
    assert words in text
    assert names(registry) == []


def test_a_subscription_has_a_name_and_may_be_tried_first(registry):
    assert alter(registry, "", ("metrics", SET, "*"))[0] == E.INVALID_REQUEST
    tried = alter(registry, "mine", ("metrics", SET, "*"), validate_only=True)
    assert (tried, names(registry)) == ((0, ""), [])


# -- what a client is to push ----------------------------------------------------------


def set_subscription(registry, name, metrics, interval_ms, match=""):
    changes = [("metrics", SET, metrics), ("interval.ms", SET, str(interval_ms))]
    changes += [("match", SET, match)] if match else []
    assert alter(registry, name, *changes) == (0, "")


def test_a_client_without_a_subscription_has_no_metrics_and_the_default_interval(
    registry,
):
    set_subscription(registry, "others", "*", 1000, "client_id=other.*")
    found = subscription_of(registry, JAVA, ID)
    assert (found.metrics, found.interval_ms) == ([], 300_000)


def test_all_that_match_count_together_and_the_shortest_interval(registry):
    set_subscription(registry, "1", "b.,a.", 60_000, "client_id=app-.*")
    set_subscription(registry, "2", "c.,a.", 2000, "client_software_version=4[.].*")
    set_subscription(registry, "3", "d.", 100, "client_id=app-.*,client_source_port=1")
    found = subscription_of(registry, JAVA, ID)
    assert (found.metrics, found.interval_ms) == (["a.", "b.", "c."], 2000)
    set_subscription(registry, "4", "*", 3000)
    found = subscription_of(registry, JAVA, ID)
    assert (found.metrics, found.interval_ms) == (["*"], 2000)


def test_no_client_is_matched_with_more_than_16_kib_of_patterns(registry):
    """All that come behind match none, unless they are about all clients."""
    for number in range(4):
        pattern = "client_id=" + "|".join(["app-.*", *["x" * 99] * 40])
        set_subscription(registry, str(number), f"{number}.", 60_000, pattern)
    set_subscription(registry, "all", "all.", 60_000)
    assert subscription_of(registry, JAVA, ID).metrics == [
        "0.",
        "1.",
        "2.",
        "3.",
        "all.",
    ]
    set_subscription(registry, "last", "last.", 60_000, "client_id=app-.*|" + "y" * 500)
    assert "last." not in subscription_of(registry, JAVA, ID).metrics


@pytest.mark.parametrize("name", Client._fields)
def test_a_pattern_is_about_the_whole_value(registry, name):
    value = getattr(JAVA, name)
    for pattern, is_match in ((value, True), (value[:-1], False), (".*", True)):
        set_subscription(registry, "one", "*", 1000, f"{name}={pattern}")
        found = subscription_of(registry, JAVA, ID)
        assert (found.metrics == ["*"]) is is_match
    if name == "client_id":
        nameless = JAVA._replace(client_id=None)
        assert subscription_of(registry, nameless, ID).metrics == []


def test_a_subscription_id_depends_on_the_client_and_the_content(registry):
    def number(uuid=ID, client=JAVA):
        return subscription_of(registry, client, uuid).subscription_id

    nothing = number()
    assert nothing == number()
    assert nothing != number(b"\2" * 16)
    set_subscription(registry, "one", "a.", 1000)
    first = number()
    set_subscription(registry, "one", "a.", 2000)
    assert len({nothing, first, number()}) == 3
    set_subscription(registry, "one", "a.", 1000)
    assert number() == first  # in whichever process, whenever


# -- asking and pushing ----------------------------------------------------------------


def ask(client, at_ms, subscription=WANTED):
    return subscribe(ID, client, subscription, now_ns=at_ms * MS, max_bytes=100)


def push(client, at_ms, metrics=b"m", *, number=42, terminating=False, codec=0):
    request = PushTelemetryRequest(
        client_instance_id=ID,
        subscription_id=number,
        terminating=terminating,
        compression_type=codec,
        metrics=metrics,
    )
    admit_push(request, client, WANTED, now_ns=at_ms * MS, max_bytes=100)
    return request


def refused(call, *arguments, **named):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **named)
    return caught.value.error_code


def test_a_client_gets_all_fields_of_its_subscription():
    told = ask(ClientInstance(), 5000)
    assert told.client_instance_id == ID
    assert told.subscription_id == 42
    assert told.accepted_compression_types == [4, 3, 1, 2]  # zstd, lz4, gzip, snappy
    assert told.push_interval_ms == 1000
    assert told.telemetry_max_bytes == 100
    assert told.delta_temporality
    assert told.requested_metrics == ["*"]


def test_it_pushes_at_once_after_asking_and_then_once_an_interval():
    client = ClientInstance()
    ask(client, 5000)
    push(client, 5001)
    assert refused(push, client, 6000) == E.THROTTLING_QUOTA_EXCEEDED
    push(client, 6001)
    assert refused(ask, client, 7000) == E.THROTTLING_QUOTA_EXCEEDED
    ask(client, 7001)
    push(client, 7002)


def test_it_asks_once_an_interval_but_at_once_if_it_was_told_to():
    client = ClientInstance()
    ask(client, 5000)
    assert refused(ask, client, 5999) == E.THROTTLING_QUOTA_EXCEEDED
    assert refused(push, client, 6000, number=41) == E.UNKNOWN_SUBSCRIPTION_ID
    ask(client, 6001)
    assert refused(push, client, 6002, codec=9) == E.UNSUPPORTED_COMPRESSION_TYPE
    ask(client, 6003)
    assert refused(ask, client, 6004) == E.THROTTLING_QUOTA_EXCEEDED


def test_a_terminating_client_may_push_early_and_then_never_again():
    client = ClientInstance()
    ask(client, 5000)
    push(client, 5001)
    push(client, 5002, terminating=True)
    assert refused(push, client, 9000) == E.INVALID_REQUEST


def test_a_request_whose_handler_died_is_not_too_early_the_second_time():
    client = ClientInstance()
    ask(client, 5000)
    ask(client, 5000)
    push(client, 5001, terminating=True)
    push(client, 5001, terminating=True)


def test_more_than_the_limit_is_refused_as_it_comes_and_inflated():
    client = ClientInstance()
    push(client, 5000, b"m" * 100)
    assert refused(push, client, 6000, b"m" * 101) == E.TELEMETRY_TOO_LARGE
    bomb = push(client, 7000, compress(4, bytes(101)), codec=4)
    assert refused(inflate, bomb, 100) == E.TELEMETRY_TOO_LARGE


@pytest.mark.parametrize("codec", range(5))
def test_metrics_are_decompressed_for_the_receiver(codec):
    request = push(ClientInstance(), 5000, compress(codec, b"metrics"), codec=codec)
    assert inflate(request, 100) == b"metrics"


@given(st.integers(1, 4), st.binary(min_size=1, max_size=60))
def test_bytes_that_are_not_compressed_as_they_say_are_no_record(codec, data):
    request = PushTelemetryRequest(compression_type=codec, metrics=data)
    try:
        assert len(inflate(request, 100)) <= 100
    except ApiError as error:
        assert error.error_code in (E.INVALID_RECORD, E.TELEMETRY_TOO_LARGE)


def test_an_empty_push_is_not_given_to_the_receiver():
    assert inflate(push(ClientInstance(), 5000, b""), 100) is None
