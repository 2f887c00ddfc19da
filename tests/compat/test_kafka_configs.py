"""Apache Kafka's kafka-configs.sh: each kind of entity altered and described."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.compat.test_java_tools import TOOLS, run_java
from tests.support.broker import Broker
from tests.support.fetch_clients import have_java_tools

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
    # Each run of the tool takes a second, and ten where cores are busy.
]


NAMED = ("topics", "groups", "client-metrics")


def configs(broker: Broker, *arguments: str) -> str:
    return run_java(
        f"{TOOLS}.ConfigCommand", "--bootstrap-server", broker.bootstrap, *arguments
    )


@pytest.mark.parametrize(
    ("kind", "name", "config"),
    [
        ("brokers", ("--entity-name", "1"), "log.cleaner.backoff.ms=14001"),
        ("brokers", ("--entity-default",), "log.cleaner.backoff.ms=14002"),
        ("topics", ("--entity-name", "kafka-configs"), "retention.ms=14003"),
        (
            "groups",
            ("--entity-name", "kafka-configs"),
            "consumer.session.timeout.ms=50004",
        ),
        ("client-metrics", ("--entity-name", "kafka-configs"), "interval.ms=14008"),
        ("users", ("--entity-name", "kafka-configs"), "producer_byte_rate=14005"),
        ("clients", ("--entity-name", "kafka-configs"), "consumer_byte_rate=14006"),
        ("ips", ("--entity-name", "192.0.2.9"), "connection_creation_rate=14007"),
    ],
)
def test_what_is_altered_is_described(
    own_broker: Broker, kind: str, name: tuple[str, ...], config: str
) -> None:
    entity = ("--entity-type", kind, *name)
    admin = AdminClient({"bootstrap.servers": own_broker.bootstrap})
    if kind == "topics":
        (made,) = admin.create_topics([NewTopic("kafka-configs", 1)]).values()
        made.result(60)
    said = configs(own_broker, *entity, "--alter", "--add-config", config)
    assert "Completed updating" in said
    # Without a name, as people ask who do not know it: found by ListConfigResources.
    wanted = entity[:2] if kind in NAMED else entity
    assert config in configs(own_broker, *wanted, "--describe")
    key = config.partition("=")[0]
    configs(own_broker, *entity, "--alter", "--delete-config", key)
    if kind == "topics":
        (gone,) = admin.delete_topics(["kafka-configs"]).values()
        gone.result(60)


def test_levels_of_loggers_are_altered_and_described(own_broker: Broker) -> None:
    entity = ("--entity-type", "broker-loggers", "--entity-name", "1")
    name = "mpbroker.coordinator"
    configs(own_broker, *entity, "--alter", "--add-config", f"{name}=WARN")
    described = configs(own_broker, *entity, "--describe")
    assert f"{name}=WARN" in described
    assert "mpbroker.storage=INFO" in described
    said = configs(own_broker, *entity, "--alter", "--delete-config", name)
    assert "Completed updating" in said
