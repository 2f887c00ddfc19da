"""Dynamic configs of a real broker: every one is taken, told, and where it counts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from mpbroker.base.config_def import ConfigKey, ConfigType, UpdateMode
from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.config.broker_key import Reader, reader_of
from mpbroker.inspect.control_protocol import (
    MAX_ANSWER_BYTES,
    FrameReader,
    encode_frame,
    socket_address,
)
from mpbroker.ipc.limits_page import Limits, LimitsPage
from mpbroker.ipc.segment import Segment
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntityData,
    EntryData,
    OpData,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from tests.broker.load import api_versions, ask, children, dial
from tests.broker.resizing import BROKER, OF_ALL, alter, settle
from tests.support.broker import Broker
from tests.support.children import wait_until

LIVE = [
    key
    for key in BROKER_CONFIG_DEF
    if reader_of(key) not in (None, Reader.SECURITY)  # of those test_live_security
    and key.name != "min.insync.replicas"  # the cluster's alone: test_answers
]
OF_ONE_LISTENER = [key.name for key in LIVE if key.per_listener]
READ_ONLY = [
    key for key in BROKER_CONFIG_DEF if key.update_mode is UpdateMode.READ_ONLY
]
# Values that differ from the default, where one more or one less will not do.
VALUES = {
    "compression.gzip.level": "5",
    "compression.type": "lz4",
    "errors.deadletterqueue.topic.name.prefix": "lost.",
    "group.consumer.heartbeat.interval.ms": "6000",
    "group.consumer.session.timeout.ms": "50000",
    "log.cleaner.io.buffer.load.factor": "0.8",
    "log.cleaner.min.cleanable.ratio": "0.6",
    "log.cleanup.policy": "compact,delete",
    "log.message.timestamp.type": "LogAppendTime",
    "max.connections.per.ip.overrides": "192.0.2.1:3",
    "metric.reporters": "com.example.Reporter",
    "num.io.threads": "2",
    "num.network.threads": "2",
    "broker.rack": "r2",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "log.cleaner.min.compaction.lag.ms": "5",
}


def other_value(key: ConfigKey) -> str:
    """A good value that is not the default."""
    if key.name in VALUES:
        return VALUES[key.name]
    if key.type is ConfigType.BOOLEAN:
        return "false" if key.default else "true"
    if key.type in (ConfigType.INT, ConfigType.LONG):
        default = key.default
        if not isinstance(default, int) or default < 2:
            return "7"
        return str(default - 1)
    if key.type is ConfigType.DOUBLE:
        return "1000000.5"
    raise AssertionError(f"{key.name}: say what to try")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dynamic")
    config = {
        "listeners": "PLAIN://127.0.0.1:0,INTERNAL://127.0.0.1:0",
        "listener.security.protocol.map": "PLAIN:PLAINTEXT,INTERNAL:PLAINTEXT",
        "inter.broker.listener.name": "INTERNAL",
        "num.io.threads": 1,
        "num.network.threads": 1,
        "metrics.listeners": "HTTP://127.0.0.1:0",
    }
    with Broker(directory / "data", config) as made:
        _LIMITS[made.pid] = limits_of(made)
        yield made


@pytest.fixture(autouse=True)
def as_it_was_started(broker):
    """Each test finds a broker without dynamic configs."""
    yield

    def is_clean() -> bool:
        for resource, source in ((BROKER, 2), (OF_ALL, 3)):
            told = describe(broker, resource).values()
            ours = {
                each.name: None
                for each in told
                if each.config_source == source and each.name != "min.insync.replicas"
            }
            if ours:
                alter(broker, ours, resource)
                return False
        return limits_of(broker) == _LIMITS[broker.pid]

    wait_until(lambda: patiently(is_clean))
    settle(broker)


# Of each broker, as it was started.
_LIMITS: dict[int, Limits] = {}


def patiently(do):
    """Clients of the test before may still count against a limit: do it again later."""
    with contextlib.suppress(OSError):
        return do()
    return None


def describe(
    broker: Broker, resource: str = BROKER
) -> dict[str, DescribeConfigsResourceResult]:
    request = DescribeConfigsRequest(
        resources=[
            DescribeConfigsResource(
                resource_type=4, resource_name=resource, configuration_keys=None
            )
        ],
        include_synonyms=True,
    )
    with dial_internal(broker) as sock:
        body = ask(sock, ApiKey.DESCRIBE_CONFIGS, 4, request.encode(4))
    (result,) = DescribeConfigsResponse.decode(4, body).results
    assert result.error_code == 0, result
    return {each.name: each for each in result.configs}


def dial_internal(broker: Broker) -> socket.socket:
    """On the listener that no limit of these tests is about."""
    host, _, port = broker.listeners["INTERNAL"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def set_configs(broker: Broker, configs, resource: str = BROKER) -> None:
    answer = alter(broker, configs, resource)
    assert answer.error_code == 0, answer


def test_every_config_that_can_change_is_taken_and_told_with_its_source(broker):
    configs = {key.name: other_value(key) for key in LIVE}
    configs.pop("max.connections.per.ip")
    set_configs(broker, configs)
    told = describe(broker)
    for key in LIVE:
        if key.name not in configs:
            continue
        found = told[key.name]
        assert found.value == key.format(key.parse(configs[key.name])), key.name
        assert found.config_source == 2, key.name
        assert not found.read_only, key.name
        own = found.synonyms[0]
        assert (own.name, own.source) == (key.name, 2)
    settle(broker)
    with dial(broker) as sock:
        assert api_versions(sock)


def test_every_config_that_cannot_change_is_refused_in_kafkas_words(broker):
    for key in READ_ONLY:
        answer = alter(broker, {key.name: "1"})
        assert answer.error_code == 42, key.name
        text = answer.error_message or ""
        assert text.startswith("Cannot update these configs dynamically: "), text
        assert key.name in text


def test_every_config_says_what_it_is(broker):
    request = DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=4, resource_name=BROKER)],
        include_documentation=True,
    )
    with dial(broker) as sock:
        body = ask(sock, ApiKey.DESCRIBE_CONFIGS, 4, request.encode(4))
    (result,) = DescribeConfigsResponse.decode(4, body).results
    for found in result.configs:
        key = BROKER_CONFIG_DEF.key(found.name)
        assert found.documentation and found.config_type == key.type.value
        assert found.is_sensitive == key.is_sensitive
        if key.is_sensitive:
            assert found.value is None


def test_of_one_broker_counts_before_of_all_before_as_started_before_the_default(
    broker,
):
    set_configs(broker, {"fetch.max.bytes": 3000}, OF_ALL)
    set_configs(broker, {"fetch.max.bytes": 2000})
    synonyms = [
        (each.value, each.source)
        for each in describe(broker)["fetch.max.bytes"].synonyms
    ]
    assert synonyms == [("2000", 2), ("3000", 3), ("57671680", 5)]
    set_configs(broker, {"fetch.max.bytes": None})
    assert describe(broker)["fetch.max.bytes"].value == "3000"
    assert describe(broker, OF_ALL)["fetch.max.bytes"].config_source == 3


@pytest.mark.parametrize("key", OF_ONE_LISTENER)
def test_a_listeners_own_config_is_told_with_the_brokers_behind_it(broker, key):
    name = f"listener.name.plain.{key}"
    set_configs(broker, {name: 3})
    found = describe(broker)[name]
    assert (found.value, found.config_source, found.read_only) == ("3", 2, False)
    assert [each.name for each in found.synonyms][:2] == [name, key]


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({"message.max.bytes": "many"}, "message.max.bytes"),
        ({"max.connections": "-1"}, "max.connections"),
        ({"listener.name.plain.max.connections": "0"}, "1 or more"),
        ({"listener.name.plain.max.connection.creation.rate": "0"}, "1 or more"),
        ({"max.connections.per.ip": "0"}, "only if"),
        ({"max.connections.per.ip.overrides": "here"}, "host:count"),
        ({"num.io.threads": "120"}, "between 1 and 119"),
        ({"listener.name.plain.num.network.threads": "64"}, "num.network.threads"),
        ({"group.min.session.timeout.ms": "99999999"}, "above"),
        ({"log.retention.ms": "0"}, "log.retention.ms"),
        ({"no.such.config": "1"}, "no.such.config"),
        ({"listener.name.plain.log.dirs": "/x"}, "log.dirs"),
        ({"ssl.keystore.location": "/x"}, "only per-listener"),
        ({"listener.name.plain.ssl.client.auth": "none"}, "of PLAINTEXT"),
        ({"listener.name.none.ssl.client.auth": "none"}, "no such listener"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_of_the_request_is_done(
    broker, configs, complaint
):
    answer = alter(broker, {"fetch.max.bytes": 5000, **configs})
    assert answer.error_code in (40, 42), answer
    assert complaint in (answer.error_message or "")
    assert describe(broker)["fetch.max.bytes"].config_source == 5


# -- that they count -------------------------------------------------------------------


def test_a_config_of_handlers_counts_in_all_of_them(broker):
    before = children(broker, "handler")
    set_configs(broker, {"num.partitions": 3})
    tries = itertools.count()

    def partitions() -> int:
        topic = MetadataRequestTopic(name=f"made-{next(tries)}")
        request = MetadataRequest(topics=[topic], allow_auto_topic_creation=True)
        with dial(broker) as sock:
            body = ask(sock, ApiKey.METADATA, 8, request.encode(8))
        return len(MetadataResponse.decode(8, body).topics[0].partitions)

    wait_until(lambda: partitions() == 3)
    wait_until(lambda: not before.items() & children(broker, "handler").items())
    assert [partitions() for _ in range(4)] == [3] * 4


def test_ctl_tells_that_processes_will_be_replaced_as_soon_as_that_is_set(broker):
    path = os.fspath(broker.data_dir / "control.sock")
    question = encode_frame({"command": "figures", "arguments": {}})
    with socket.socket(socket.AF_UNIX) as sock, socket_address(path) as address:
        sock.connect(address)
        sock.sendall(question)
        assert not receive_figures(sock)["resizing"]
        # While it waits: it finds both at a time.
        wait_until(lambda: b") S " in Path(f"/proc/{broker.pid}/stat").read_bytes())
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            set_configs(broker, {"fetch.max.bytes": 9000})
            sock.sendall(question)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert receive_figures(sock)["resizing"]


def receive_figures(sock: socket.socket) -> dict[str, Any]:
    reader = FrameReader(MAX_ANSWER_BYTES)
    while (answer := reader.next_map()) is None:
        reader.feed(sock.recv(1 << 16))
    assert answer["ok"], answer
    figures: dict[str, Any] = answer["result"]
    return figures


def test_topics_without_a_config_of_their_own_follow_the_brokers(broker):
    with dial(broker) as sock:
        request = MetadataRequest(
            topics=[MetadataRequestTopic(name="follower")],
            allow_auto_topic_creation=True,
        )
        body = ask(sock, ApiKey.METADATA, 8, request.encode(8))
    (topic,) = MetadataResponse.decode(8, body).topics
    assert topic.error_code in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
    set_configs(broker, {"message.max.bytes": 1234}, OF_ALL)
    request = DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=2, resource_name="follower")],
        include_synonyms=True,
    )
    with dial(broker) as sock:
        body = ask(sock, ApiKey.DESCRIBE_CONFIGS, 4, request.encode(4))
    (result,) = DescribeConfigsResponse.decode(4, body).results
    assert (result.error_code, result.error_message) == (0, None)
    (found,) = [each for each in result.configs if each.name == "max.message.bytes"]
    assert (found.value, found.config_source) == ("1234", 3)


def test_idle_connections_are_closed_when_that_was_set_while_they_were_idle(broker):
    with dial(broker) as sock:
        assert api_versions(sock)
        set_configs(broker, {"connections.max.idle.ms": 200})
        assert sock.recv(1) == b""


def test_the_housekeeper_and_the_coordinator_are_replaced_for_what_they_read(broker):
    settle(broker)
    before = children(broker)
    set_configs(broker, {"log.cleaner.backoff.ms": 1000, "group.max.size": 9})

    def replaced() -> bool:
        now = children(broker)
        return all(
            now[role, 0] not in (0, before[role, 0])
            for role in ("housekeeper", "coordinator")
        )

    wait_until(replaced)
    settle(broker)


def test_what_was_set_counts_after_the_next_start(tmp_path):
    broker = Broker(tmp_path / "data", {"num.io.threads": 1})
    with broker:
        answer = alter(broker, {"num.partitions": 4, "max.connections.per.ip": 50})
        assert answer.error_code == 0
        broker.stop()
        broker.start()
        request = MetadataRequest(
            topics=[MetadataRequestTopic(name="t")], allow_auto_topic_creation=True
        )
        with dial(broker) as sock:
            body = ask(sock, ApiKey.METADATA, 8, request.encode(8))
        assert limits_of(broker).broker.max_per_address == 50
        assert len(MetadataResponse.decode(8, body).topics[0].partitions) == 4


# -- connections, as in Kafka's DynamicConnectionQuotaTest -----------------------------


def limits_of(broker: Broker) -> Limits:
    """What its acceptors and processors obey at this moment."""
    for number in os.listdir(f"/proc/{broker.pid}/fd"):
        path = f"/proc/{broker.pid}/fd/{number}"
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(path).startswith("/memfd:mpbroker-limits"):
                fd = os.open(path, os.O_RDWR)
                try:
                    return LimitsPage(Segment(fd, os.fstat(fd).st_size)).read()
                finally:
                    os.close(fd)
    raise AssertionError("no page")


def set_limits(broker: Broker, configs) -> None:
    """Through the protected listener, and wait until they are obeyed."""
    before = limits_of(broker)
    external, broker.bootstrap = broker.bootstrap, broker.listeners["INTERNAL"]
    try:
        answer = wait_until(lambda: patiently(lambda: alter(broker, configs)))
        assert answer.error_code == 0, answer
    finally:
        broker.bootstrap = external
    wait_until(lambda: limits_of(broker) != before)


def is_served(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(api_versions(sock))
    return False


def test_the_limit_of_an_address_and_its_exception_change_at_run_time(broker):
    set_limits(broker, {"max.connections.per.ip": 5})
    # This broker's own probe, and the test's last request, may count for a moment.
    wait_until(lambda: served_of(broker, 9) == 5)
    set_limits(broker, {"max.connections.per.ip.overrides": "127.0.0.1:7"})
    wait_until(lambda: served_of(broker, 9) == 7)
    set_limits(broker, {"max.connections.per.ip.overrides": "localhost:6"})  # by name
    wait_until(lambda: served_of(broker, 9) == 6)


def served_of(broker: Broker, count: int) -> int:
    """How many of so many clients at one time get an answer; none waits."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(count)]
        return sum(map(is_served, socks))


def is_served_once(broker: Broker) -> bool:
    with dial(broker) as sock:
        return is_served(sock)


def test_above_the_brokers_limit_idle_connections_of_other_listeners_are_closed(broker):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(6)]
        assert all(map(is_served, socks))
        with dial_internal(broker) as internal:
            assert is_served(internal)
            # One of the test before that still counts would cost one more of ours.
            wait_until(lambda: rows_of(broker) == len(socks) + 1)
            set_limits(broker, {"max.connections": 4})
            # Those that were silent longest go; the protected listener's stay.
            assert socks[0].recv(1) == b"" and socks[1].recv(1) == b""
            assert is_served(internal)
            assert is_served(socks[5])
            set_limits(broker, {"max.connections": None})
        wait_until(lambda: is_served_once(broker))


def test_a_listener_that_is_full_serves_who_waits_when_there_is_room(broker):
    name = "listener.name.plain.max.connections"
    set_limits(broker, {name: 2})
    wait_until(lambda: count_connections(broker) <= 1)
    with dial(broker) as one, dial(broker) as two, dial(broker) as waiting:
        assert is_served(one)
        served = is_served(two)
        waiting.settimeout(0.2)
        assert served and not is_served(waiting)
        with dial_internal(broker) as internal:
            assert is_served(internal)
        one.close()
        waiting.settimeout(60)
        assert waiting.recv(1)  # the answer to what it asked while it waited


def rows_of(broker: Broker) -> int:
    """Clients of all listeners, as the broker counts them."""
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 60.0) as client:
        return len(client.request("connections")["connections"])


def count_connections(broker: Broker) -> int:
    """Clients of the first listener, from its socket's point of view."""
    port = int(broker.bootstrap.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        lines = [line.split() for line in table][1:]
    return sum(
        fields[3] == "01" and int(fields[1].partition(":")[2], 16) == port
        for fields in lines
    )


def test_a_listeners_rate_slows_down_who_connects_and_nobody_is_refused(broker):
    name = "listener.name.plain.max.connection.creation.rate"
    set_limits(broker, {name: 1})
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(14)]
        assert all(map(is_served, socks))
    # Ten may come at once; the others come at one a second.
    assert time.monotonic() - began > 1
    set_limits(broker, {name: None})
    assert is_served_once(broker)


def test_an_addresss_rate_is_kept_for_new_connections_and_freed_again(broker):
    set_rate(broker, 0)
    try:
        with dial(broker) as refused:
            assert not is_served(refused)  # held for a while, and closed
    finally:
        set_rate(broker, None)
    assert is_served_once(broker)


_CONTROL: dict[int, socket.socket] = {}


def set_rate(broker: Broker, rate: float | None) -> None:
    """Through a connection that was there before: new ones are what it is about."""
    op = OpData(key="connection_creation_rate", value=rate or 0.0, remove=rate is None)
    entity = EntityData(entity_type="ip", entity_name="127.0.0.1")
    request = AlterClientQuotasRequest(
        entries=[EntryData(entity=[entity], ops=[op])], validate_only=False
    )
    before = limits_of(broker)
    sock = _CONTROL.pop(broker.pid, None) or dial_internal(broker)
    body = ask(sock, ApiKey.ALTER_CLIENT_QUOTAS, 1, request.encode(1))
    answer = AlterClientQuotasResponse.decode(1, body).entries[0]
    assert answer.error_code == 0, answer
    wait_until(lambda: limits_of(broker) != before)
    if rate is None:
        sock.close()
    else:
        _CONTROL[broker.pid] = sock


def test_every_reader_of_a_setting_has_at_least_one() -> None:
    assert {reader_of(key) for key in BROKER_CONFIG_DEF} - {None} == set(Reader)
