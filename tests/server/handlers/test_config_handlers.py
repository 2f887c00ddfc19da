"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs, as clients see them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.metadata.topics import Alteration
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages import alter_configs as alter
from mpbroker.protocol.messages import describe_configs as describe
from mpbroker.protocol.messages import incremental_alter_configs as incremental
from mpbroker.protocol.messages.list_config_resources import (
    ListConfigResourcesRequest,
)
from mpbroker.server.answer_budget import AnswerBudget
from mpbroker.server.configs.config_entries import BrokerConfigs
from mpbroker.server.handlers.alter_configs import handle_alter_configs
from mpbroker.server.handlers.describe_configs import handle_describe_configs
from mpbroker.server.handlers.incremental_alter_configs import (
    handle_incremental_alter_configs,
)
from mpbroker.server.handlers.list_config_resources import (
    handle_list_config_resources,
)
from tests.server.contexts import context
from tests.support.metadata import start

TOPIC, BROKER, BROKER_LOGGER, GROUP = 2, 4, 8, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
STATIC = {
    "log.retention.hours": "1",
    "ssl.key.password": "hunter2",
    "num.io.threads": "4",
    "group.consumer.heartbeat.interval.ms": "7000",
}
VALUES = {"log.retention.hours": 1}


@pytest.fixture
def registry(tmp_path):
    registry = start(tmp_path, broker_values=VALUES)
    registry.create_topic("t", 1, {"segment.bytes": "1000"})
    return registry


def describe_one(
    registry,
    kind,
    name,
    *,
    keys=None,
    synonyms=True,
    documentation=False,
    static=STATIC,
):
    request = describe.DescribeConfigsRequest(
        resources=[
            describe.DescribeConfigsResource(
                resource_type=kind, resource_name=name, configuration_keys=keys
            )
        ],
        include_synonyms=synonyms,
        include_documentation=documentation,
    )
    response = handle_describe_configs(
        request, context(registry, static_configs=static)
    )
    # As the client gets it, in every version that can say it.
    for version in range(1, 5):
        response.encode(version)
    (result,) = describe.DescribeConfigsResponse.decode(4, response.encode(4)).results
    return result


def entries(registry, kind, name, **options):
    result = describe_one(registry, kind, name, **options)
    assert result.error_code == ErrorCode.NONE
    assert result.error_message is None
    return {entry.name: entry for entry in result.configs}


def sources(entry):
    return [(synonym.name, synonym.value, synonym.source) for synonym in entry.synonyms]


def replace(registry, kind, name, configs, **options):
    request = alter.AlterConfigsRequest(
        resources=[
            alter.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[
                    alter.AlterableConfig(name=key, value=value)
                    for key, value in configs
                ],
            )
        ],
        **options,
    )
    response = handle_alter_configs(request, context(registry, static_configs=STATIC))
    (result,) = alter.AlterConfigsResponse.decode(2, response.encode(2)).responses
    assert (result.resource_type, result.resource_name) == (kind, name)
    return ErrorCode(result.error_code), result.error_message


def edit(registry, kind, name, *operations, **options):
    request = incremental.IncrementalAlterConfigsRequest(
        resources=[
            incremental.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[
                    incremental.AlterableConfig(
                        name=key, config_operation=operation, value=value
                    )
                    for operation, key, value in operations
                ],
            )
        ],
        **options,
    )
    response = handle_incremental_alter_configs(
        request, context(registry, static_configs=STATIC)
    )
    body = response.encode(1)
    (result,) = incremental.IncrementalAlterConfigsResponse.decode(1, body).responses
    return ErrorCode(result.error_code), result.error_message


def overrides(registry, name="t"):
    return registry.topic(name).config.overrides


# -- describing topics ----------------------------------------------------------------


def test_a_topics_own_value_comes_before_the_inherited_ones(registry):
    entry = entries(registry, TOPIC, "t")["segment.bytes"]
    assert (entry.value, entry.config_source, entry.read_only) == ("1000", 1, False)
    assert sources(entry) == [
        ("segment.bytes", "1000", 1),
        ("log.segment.bytes", "1073741824", 5),
    ]
    assert entry.config_type == 3


def test_an_inherited_value_names_the_layer_that_it_is_from(registry):
    entry = entries(registry, TOPIC, "t")["retention.ms"]
    assert (entry.value, entry.config_source) == ("3600000", 4)
    assert sources(entry) == [
        ("log.retention.hours", "1", 4),
        ("log.retention.hours", "168", 5),
    ]
    edit(registry, BROKER, "", (SET, "log.retention.ms", "7"))
    edit(registry, BROKER, "1", (SET, "log.retention.ms", "8"))
    entry = entries(registry, TOPIC, "t")["retention.ms"]
    assert (entry.value, entry.config_source) == ("8", 2)
    assert sources(entry)[:3] == [
        ("log.retention.ms", "8", 2),
        ("log.retention.ms", "7", 3),
        ("log.retention.hours", "1", 4),
    ]


def test_all_keys_are_described_unless_the_request_names_some(registry):
    assert set(entries(registry, TOPIC, "t")) == {key.name for key in LOG_CONFIG_DEF}
    assert set(entries(registry, TOPIC, "t", keys=[])) == {
        key.name for key in LOG_CONFIG_DEF
    }
    asked = entries(registry, TOPIC, "t", keys=["segment.ms", "no.such"])
    assert list(asked) == ["segment.ms"]


def test_synonyms_and_documentation_come_only_if_the_request_wants_them(registry):
    entry = entries(registry, TOPIC, "t", synonyms=False)["segment.bytes"]
    assert (entry.synonyms, entry.documentation) == ([], None)
    entry = entries(registry, TOPIC, "t", documentation=True)["segment.bytes"]
    assert "segment" in entry.documentation


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (TOPIC, "none", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "sp ace", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (TOPIC, "", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (BROKER, "2", ErrorCode.INVALID_REQUEST),
        (BROKER, "one", ErrorCode.INVALID_REQUEST),
        (BROKER_LOGGER, "1", ErrorCode.INVALID_REQUEST),
        (99, "", ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_resource_that_cannot_be_described_has_a_reason(registry, kind, name, code):
    result = describe_one(registry, kind, name)
    assert (result.error_code, result.configs) == (code, [])
    assert result.error_message


# -- describing the broker ------------------------------------------------------------


def test_a_brokers_values_say_which_may_change_while_it_runs(registry):
    found = entries(registry, BROKER, "1")
    assert set(found) == {key.name for key in BROKER_CONFIG_DEF}
    threads, requests = found["num.io.threads"], found["socket.request.max.bytes"]
    assert (threads.value, threads.config_source, threads.read_only) == ("4", 4, False)
    assert sources(threads) == [("num.io.threads", "4", 4), ("num.io.threads", "2", 5)]
    assert (requests.value, requests.config_source, requests.read_only) == (
        "104857600",
        5,
        True,
    )


def test_a_key_without_a_value_is_not_said_to_be_set(registry):
    found = entries(registry, BROKER, "1", keys=["log.retention.ms"])
    entry = found["log.retention.ms"]
    assert (entry.value, entry.config_source, entry.synonyms) == (None, 5, [])
    edit(registry, BROKER, "1", (SET, "log.retention.ms", "9"))
    found = entries(registry, BROKER, "1", keys=["log.retention.ms"])
    assert sources(found["log.retention.ms"]) == [
        ("log.retention.ms", "9", 2),
        ("log.retention.hours", "1", 4),
        ("log.retention.hours", "168", 5),
    ]


def test_an_answer_has_a_budget_whatever_is_described(registry, monkeypatch):
    """A resource is 10 KB of an answer, and a few bytes of a request."""
    monkeypatch.setattr(AnswerBudget.__init__, "__defaults__", (100_000,))
    resources = [
        describe.DescribeConfigsResource(
            resource_type=GROUP, resource_name=f"g{number}"
        )
        for number in range(200)
    ]
    request = describe.DescribeConfigsRequest(
        resources=[*resources, resources[0]], include_documentation=True
    )
    response = handle_describe_configs(
        request, context(registry, static_configs=STATIC)
    )
    codes = [each.error_code for each in response.results]
    fit = codes.index(ErrorCode.POLICY_VIOLATION)
    assert fit > 1 and set(codes[:fit]) == {ErrorCode.NONE}
    assert set(codes[fit:]) == {ErrorCode.POLICY_VIOLATION}
    refused = response.results[-1]
    assert refused.configs == [] and "100000 bytes" in refused.error_message
    size = len(response.encode(4))
    assert 50_000 < size < 150_000


@pytest.fixture
def looked_up(monkeypatch):
    """The keys whose values were looked up in the broker's configs, in their order."""
    names = []
    synonyms = BrokerConfigs._synonyms_of

    def noting(configs, wanted):
        names.append(wanted)
        return synonyms(configs, wanted)

    monkeypatch.setattr(BrokerConfigs, "_synonyms_of", noting)
    return names


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (GROUP, ["g", *map(str, range(200))]),
        (TOPIC, ["u", "v", "w"]),
        (TOPIC, ["t"] * 200),
        (BROKER, ["1"] * 200),
    ],
)
def test_what_many_resources_have_in_common_is_made_once(
    registry, looked_up, kind, names
):
    for name in ("u", "v", "w"):
        registry.create_topic(name, 1)
    answers = []
    for wanted in (names[:1], names):
        looked_up.append(None)
        request = describe.DescribeConfigsRequest(
            resources=[
                describe.DescribeConfigsResource(resource_type=kind, resource_name=name)
                for name in wanted
            ],
            include_synonyms=True,
        )
        answers.append(
            handle_describe_configs(request, context(registry, static_configs=STATIC))
        )
    second = looked_up.index(None, 1)
    assert len(looked_up[:second]) == len(looked_up[second:])
    (one,), many = answers[0].results, answers[1].results
    assert [each.resource_name for each in many] == names
    assert all(each.configs == one.configs for each in many) and one.configs


def test_a_resource_may_be_described_again(registry):
    resource = describe.DescribeConfigsResource(resource_type=BROKER, resource_name="1")
    response = handle_describe_configs(
        describe.DescribeConfigsRequest(resources=[resource] * 2),
        context(registry, static_configs=STATIC),
    )
    first, last = response.results
    assert first == last and first.configs


def test_credentials_in_a_url_are_never_shown(registry):
    static = {**STATIC, "otlp.endpoint": "http://collector/v1?token=hunter2"}
    entry = entries(registry, BROKER, "1", static=static)["otlp.endpoint"]
    shown = "http://collector/v1?token=[hidden]"
    assert (entry.value, entry.is_sensitive) == (shown, False)
    assert sources(entry) == [("otlp.endpoint", shown, 4)]


def test_a_password_is_never_shown(registry):
    entry = entries(registry, BROKER, "1")["ssl.key.password"]
    assert (entry.value, entry.is_sensitive, entry.config_source) == (None, True, 4)
    assert sources(entry) == [("ssl.key.password", None, 4)]


def test_the_cluster_default_shows_only_configs_that_are_set_there(registry):
    always = ["min.insync.replicas"]  # as in Kafka: KIP-966
    assert list(entries(registry, BROKER, "")) == always
    edit(registry, BROKER, "", (SET, "log.preallocate", "TRUE"))
    found = entries(registry, BROKER, "")
    entry = found.pop("log.preallocate")
    assert list(found) == always
    assert (entry.name, entry.value, entry.config_source) == (
        "log.preallocate",
        "true",
        3,
    )
    assert entries(registry, BROKER, "", keys=["segment.ms"]) == {}


# -- replacing ------------------------------------------------------------------------


def test_replacing_resets_the_configs_that_are_not_named(registry):
    assert replace(registry, TOPIC, "t", [("retention.ms", "5")])[0] is ErrorCode.NONE
    assert overrides(registry) == {"retention.ms": "5"}
    assert replace(registry, TOPIC, "t", [])[0] is ErrorCode.NONE
    assert overrides(registry) == {}


@pytest.mark.parametrize(
    ("kind", "name", "configs", "code"),
    [
        (TOPIC, "t", [("retention.ms", None)], ErrorCode.INVALID_REQUEST),
        (TOPIC, "t", [("retention.ms", "soon")], ErrorCode.INVALID_CONFIG),
        (TOPIC, "t", [("retention.m", "1")], ErrorCode.INVALID_CONFIG),
        (TOPIC, "t", [("segment.ms", "1")] * 2, ErrorCode.INVALID_REQUEST),
        (TOPIC, "none", [], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "", [], ErrorCode.INVALID_REQUEST),
        (BROKER, "2", [], ErrorCode.INVALID_REQUEST),
        (BROKER, "", [("log.dirs", "/x")], ErrorCode.INVALID_REQUEST),
        (BROKER, "", [("broker.id", "2")], ErrorCode.INVALID_REQUEST),
        (BROKER, "", [("num.io.threads", "0")], ErrorCode.INVALID_REQUEST),
        (BROKER, "", [("num.io.thread", "1")], ErrorCode.INVALID_CONFIG),
        (BROKER, "", [("log.retention.ms", "0")], ErrorCode.INVALID_REQUEST),
        (BROKER, "", [("ssl.client.auth", "none")], ErrorCode.INVALID_REQUEST),
        (BROKER, "1", [("ssl.key.password", "x")], ErrorCode.INVALID_REQUEST),
        (BROKER, "1", [("ssl.keystore.location", "/x")], ErrorCode.INVALID_REQUEST),
        (
            BROKER,
            "",
            [("listener.name.a.ssl.client.auth", "none")],
            ErrorCode.INVALID_REQUEST,
        ),
        (
            BROKER,
            "1",
            [("listener.name.a.ssl.client.auth", "maybe")],
            ErrorCode.INVALID_REQUEST,
        ),
        (BROKER_LOGGER, "1", [], ErrorCode.INVALID_REQUEST),
        (77, "1", [], ErrorCode.INVALID_REQUEST),
    ],
)
def test_an_invalid_replacement_has_a_reason_and_changes_nothing(
    registry, kind, name, configs, code
):
    version = registry.version
    assert replace(registry, kind, name, configs)[0] is code
    assert registry.version == version


def test_validation_alone_changes_nothing(registry):
    version = registry.version
    options = {"validate_only": True}
    assert replace(registry, TOPIC, "t", [], **options)[0] is ErrorCode.NONE
    code, _ = edit(registry, TOPIC, "t", (SET, "segment.ms", "x"), **options)
    assert code is ErrorCode.INVALID_CONFIG
    assert registry.version == version


def test_a_resource_named_twice_is_refused_both_times(registry):
    resource = alter.AlterConfigsResource(resource_type=TOPIC, resource_name="t")
    response = handle_alter_configs(
        alter.AlterConfigsRequest(resources=[resource, resource]),
        context(registry, static_configs=STATIC),
    )
    assert [each.error_code for each in response.responses] == [
        ErrorCode.INVALID_REQUEST
    ] * 2
    assert overrides(registry) == {"segment.bytes": "1000"}


def test_a_request_is_written_at_once_except_for_brokers(registry, monkeypatch):
    registry.create_topic("u", 1)
    syncs = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    wanted = {
        (TOPIC, "t"): ("retention.ms", "5"),
        (BROKER, ""): ("log.retention.ms", "6"),
        (TOPIC, "u"): ("retention.ms", "no number"),
        (GROUP, "g"): ("consumer.session.timeout.ms", "45000"),
        (BROKER, "1"): ("log.retention.ms", "7"),
        (TOPIC, "none"): ("retention.ms", "5"),
    }
    resources = [
        alter.AlterConfigsResource(
            resource_type=kind,
            resource_name=name,
            configs=[alter.AlterableConfig(name=key, value=value)],
        )
        for (kind, name), (key, value) in wanted.items()
    ]
    response = handle_alter_configs(
        alter.AlterConfigsRequest(resources=resources),
        context(registry, static_configs=STATIC),
    )
    assert [each.error_code for each in response.responses] == [
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.INVALID_CONFIG,
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert len(syncs) == 3
    assert overrides(registry) == {"retention.ms": "5"}
    assert registry.group_overrides("g") == {"consumer.session.timeout.ms": "45000"}
    assert registry.broker_overrides("1") == {"log.retention.ms": "7"}


# -- editing --------------------------------------------------------------------------


def test_editing_changes_only_the_configs_that_are_named(registry):
    edit(registry, TOPIC, "t", (SET, "retention.ms", "5"), (SET, "segment.ms", "6"))
    edit(registry, TOPIC, "t", (DELETE, "segment.ms", None), (DELETE, "flush.ms", None))
    assert overrides(registry) == {"segment.bytes": "1000", "retention.ms": "5"}


def test_appending_starts_from_the_list_in_effect(registry):
    edit(registry, TOPIC, "t", (APPEND, "cleanup.policy", "compact"))
    assert overrides(registry)["cleanup.policy"] == "delete,compact"
    edit(registry, TOPIC, "t", (APPEND, "cleanup.policy", "compact"))
    assert overrides(registry)["cleanup.policy"] == "delete,compact"
    edit(registry, TOPIC, "t", (SUBTRACT, "cleanup.policy", "delete"))
    assert overrides(registry)["cleanup.policy"] == "compact"


def test_appending_to_an_inherited_list_keeps_its_members(registry):
    edit(registry, BROKER, "", (SET, "log.cleanup.policy", "compact"))
    edit(registry, TOPIC, "t", (APPEND, "cleanup.policy", "delete"))
    assert overrides(registry)["cleanup.policy"] == "compact,delete"
    key = "follower.replication.throttled.replicas"
    edit(registry, TOPIC, "t", (APPEND, key, "0:1, 1:1"))
    assert overrides(registry)[key] == "0:1,1:1"


def test_a_brokers_list_can_be_edited(registry):
    edit(registry, BROKER, "1", (APPEND, "max.connections.per.ip.overrides", "h:1"))
    edit(registry, BROKER, "1", (APPEND, "max.connections.per.ip.overrides", "i:2"))
    assert registry.broker_overrides("1") == {
        "max.connections.per.ip.overrides": "h:1,i:2"
    }


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ((APPEND, "segment.bytes", "1"), ErrorCode.INVALID_CONFIG),
        ((APPEND, "no.such.key", "1"), ErrorCode.INVALID_CONFIG),
        ((APPEND, "cleanup.policy", "burn"), ErrorCode.INVALID_CONFIG),
        ((SET, "segment.bytes", None), ErrorCode.INVALID_REQUEST),
        ((7, "segment.bytes", "1"), ErrorCode.INVALID_REQUEST),
        ((-1, "segment.bytes", "1"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_an_operation_that_makes_no_sense_says_why(registry, operation, code):
    answered, message = edit(registry, TOPIC, "t", operation)
    assert (answered, overrides(registry)) == (code, {"segment.bytes": "1000"})
    assert operation[1] in message


def test_two_operations_on_one_key_are_refused(registry):
    code, message = edit(
        registry, TOPIC, "t", (SET, "segment.ms", "1"), (DELETE, "segment.ms", None)
    )
    assert code is ErrorCode.INVALID_REQUEST
    assert "duplicate config keys: segment.ms" in message


@given(
    operations=st.lists(
        st.tuples(
            st.integers(-1, 4),
            st.sampled_from(["cleanup.policy", "segment.bytes", "x", ""]),
            st.none() | st.sampled_from(["", "compact", "delete,compact", "5", ","]),
        ),
        max_size=4,
    ),
    kind=st.sampled_from([TOPIC, BROKER, BROKER_LOGGER]),
    name=st.sampled_from(["t", "1", "", "u"]),
)
def test_any_edit_is_made_or_refused_with_a_reason(
    tmp_path_factory, operations, kind, name
):
    registry = start(tmp_path_factory.mktemp("log"))
    registry.create_topic("t", 1)
    before = registry.version
    code, message = edit(registry, kind, name, *operations)
    if code is not ErrorCode.NONE:
        assert message
        assert registry.version == before


# -- groups ----------------------------------------------------------------------------


def test_a_group_has_the_brokers_configs_until_it_has_its_own(registry):
    before = entries(registry, GROUP, "g")
    assert {name: entry.value for name, entry in before.items()} == {
        "consumer.session.timeout.ms": "45000",
        "consumer.heartbeat.interval.ms": "7000",
        "consumer.assignment.interval.ms": "1000",
        "share.session.timeout.ms": "45000",
        "share.heartbeat.interval.ms": "5000",
        "share.record.lock.duration.ms": "30000",
        "share.delivery.count.limit": "5",
        "share.partition.max.record.locks": "2000",
        "share.auto.offset.reset": "latest",
        "share.isolation.level": "read_uncommitted",
        "share.renew.acknowledge.enable": "true",
        "share.assignment.interval.ms": "1000",
        "streams.session.timeout.ms": "45000",
        "streams.heartbeat.interval.ms": "5000",
        "streams.num.standby.replicas": "0",
        "streams.initial.rebalance.delay.ms": "3000",
        "streams.assignment.interval.ms": "1000",
        "streams.assignor.name": "sticky",
        "streams.rack.aware.assignment.tags": "",
        "errors.deadletterqueue.copy.record.enable": "false",
        "errors.deadletterqueue.topic.name": "",
    }
    session = "consumer.session.timeout.ms"
    assert edit(registry, GROUP, "g", (SET, session, "50000"))[0] == 0
    entry = entries(registry, GROUP, "g")[session]
    assert (entry.value, entry.config_source) == ("50000", 8)
    assert sources(entry) == [(session, "50000", 8), (session, "45000", 5)]
    assert entries(registry, GROUP, "other")[session].value == "45000"
    assert edit(registry, GROUP, "g", (DELETE, session, None))[0] == 0
    assert registry.group_overrides("g") == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("consumer.session.timeout.ms", "44999", "which is 45000; it is 44999"),
        ("consumer.session.timeout.ms", "60001", "which is 60000"),
        ("consumer.session.timeout.ms", "soon", "soon"),
        ("consumer.heartbeat.interval.ms", "4999", "group.consumer.min.heartbeat"),
        ("consumer.no.such.ms", "1", "consumer.no.such.ms"),
        ("share.delivery.count.limit", "11", "which is 10; it is 11"),
        ("share.auto.offset.reset", "by_duration:PT", "share.auto.offset.reset"),
        ("share.auto.offset.reset", "none", "share.auto.offset.reset"),
        ("share.isolation.level", "none", "share.isolation.level"),
    ],
)
def test_invalid_configs_of_a_group_are_refused(registry, name, value, words):
    for code, message in (
        edit(registry, GROUP, "g", (SET, name, value)),
        replace(registry, GROUP, "g", [(name, value)]),
    ):
        assert code == ErrorCode.INVALID_CONFIG
        assert words in message
    assert registry.group_overrides("g") == {}


def test_the_brokers_limits_are_read_once_for_all_groups_of_a_request(
    registry, looked_up
):
    """All other changes of the metadata wait meanwhile."""

    def alter_groups(count):
        name = "consumer.session.timeout.ms"
        resources = [
            incremental.AlterConfigsResource(
                resource_type=GROUP,
                resource_name=f"{count}-{number}",
                configs=[
                    incremental.AlterableConfig(
                        name=name, config_operation=SET, value="45000"
                    )
                ],
            )
            for number in range(count)
        ]
        request = incremental.IncrementalAlterConfigsRequest(resources=resources)
        response = handle_incremental_alter_configs(
            request, context(registry, static_configs=STATIC)
        )
        assert {each.error_code for each in response.responses} == {0}

    alter_groups(1)
    once = len(looked_up)
    alter_groups(300)
    assert len(looked_up) == 2 * once
    # What the metadata says now counts, not what it said at the request before.
    most = "group.consumer.max.session.timeout.ms"
    registry.alter_broker_config("", lambda _: {most: "45000"})
    assert edit(
        registry, GROUP, "g", (SET, "consumer.session.timeout.ms", "45001")
    ) == (
        ErrorCode.INVALID_CONFIG,
        "consumer.session.timeout.ms must be less than or equal to"
        f" {most}, which is 45000; it is 45001",
    )


def test_a_group_resource_has_a_name(registry):
    name = "consumer.session.timeout.ms"
    assert edit(registry, GROUP, "", (SET, name, "45000"))[0] == (
        ErrorCode.INVALID_REQUEST
    )
    assert describe_one(registry, GROUP, "").error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("version", "kinds", "expected"),
    [
        (0, [], []),
        (1, [TOPIC], [("t", TOPIC)]),
        (1, [BROKER, BROKER], [("1", BROKER)]),
        (1, [BROKER_LOGGER], [("1", BROKER_LOGGER)]),
        (1, [16], []),
        (1, [32], [("g", 32)]),
        (
            1,
            [],
            [("t", TOPIC), ("1", BROKER), ("1", BROKER_LOGGER), ("g", 32)],
        ),
    ],
)
def test_resources_with_configs_are_listed_by_type(registry, version, kinds, expected):
    texts = {"consumer.heartbeat.interval.ms": "6"}
    registry.alter_configs([Alteration(GROUP, "g", lambda _: texts)])
    request = ListConfigResourcesRequest(resource_types=kinds)
    answer = handle_list_config_resources(request, context(registry, version=version))
    assert answer.error_code == 0
    found = [
        (each.resource_name, each.resource_type) for each in answer.config_resources
    ]
    assert found == expected


def test_kinds_that_have_no_configs_cannot_be_listed(registry):
    request = ListConfigResourcesRequest(resource_types=[TOPIC, 77])
    answer = handle_list_config_resources(request, context(registry, version=1))
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert not answer.config_resources
