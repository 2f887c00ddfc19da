"""Every setting of Apache Kafka 4.4.0 is here, as Kafka has it or as told below."""

from __future__ import annotations

from typing import Final

import pytest

from mpbroker.base.config_def import ConfigKey, UpdateMode
from mpbroker.config import BROKER_CONFIG_DEF, BrokerConfig, explain
from mpbroker.config.explanation import explain_topic_key
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from tests.config.kafka_keys import TABLE, KafkaKey, kafka_keys, table_of_jars
from tests.support.fetch_clients import have_java_tools

KEYS: Final = {key.name: key for key in kafka_keys()}

# Our defaults where they are not Kafka's; the documentation of each key says why.
OUR_DEFAULTS: Final = {
    "broker.id": "1",
    "listeners": "PLAINTEXT://127.0.0.1:9092",
    "log.dir": "/var/lib/mpbroker",
    "log.dirs": "/var/lib/mpbroker",
    "node.id": "1",
    "num.io.threads": "2",  # here and in the next row: on one core
    "num.network.threads": "1",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "socket.listen.backlog.size": "4096",
    "socket.receive.buffer.bytes": "-1",
    "socket.send.buffer.bytes": "-1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.replication.factor": "1",
}

# Kafka parses these strings itself; here they are lists.
OUR_LISTS: Final = {
    "listener.security.protocol.map",
    "max.connections.per.ip.overrides",
}

# Kafka refuses the last two as well; a provider is asked when the broker starts.
NOT_DYNAMIC: Final = {"config.providers", "listeners", "listener.security.protocol.map"}

UNUSED: Final = [name for name in KEYS if not BROKER_CONFIG_DEF.key(name).has_effect]


def ours(kafkas: KafkaKey) -> ConfigKey:
    return BROKER_CONFIG_DEF.key(kafkas.name)


@pytest.mark.skipif(not have_java_tools(), reason="no jars of Apache Kafka")
def test_the_table_is_that_of_the_jars():
    assert TABLE.read_text() == table_of_jars()


def test_every_key_is_known():
    assert len(KEYS) == 353
    assert [name for name in KEYS if name not in BROKER_CONFIG_DEF] == []


# Kafka's own documentation leaves them out: they are internal, or an authorizer's.
KAFKAS_TOO: Final = {
    *("allow.everyone.if.no.acl.found", "super.users", "control.plane.listener.name"),
    *("controller.performance.always.log.threshold.ms", "server.max.startup.time.ms"),
    *("controller.performance.sample.period.ms", "group.share.persister.class.name"),
    *("group.consumer.regex.refresh.interval.ms", "log.initial.task.delay.ms"),
    *("group.share.initialize.retry.interval.ms", "remote.log.index.file.cache.ttl.ms"),
    *("internal.metadata.delete.delay.millis", "internal.metadata.log.segment.bytes"),
    *("internal.metadata.max.batch.size.in.bytes", "unstable.api.versions.enable"),
    *("producer.id.expiration.check.interval.ms", "unstable.feature.versions.enable"),
    *(
        "remote.log.manager.task.retry.backoff.max.ms",
        "unclean.leader.election.interval.ms",
    ),
    *(
        "remote.log.manager.task.retry.backoff.ms",
        "remote.log.manager.task.retry.jitter",
    ),
    "share.coordinator.cold.partition.snapshot.interval.ms",
    "share.coordinator.state.topic.prune.interval.ms",
}


def test_a_key_is_told_to_be_kafkas_or_ours():
    ours = {key.name for key in BROKER_CONFIG_DEF if explain(key.name).is_ours}
    assert ours == {key.name for key in BROKER_CONFIG_DEF} - KEYS.keys() - KAFKAS_TOO
    topics = {key.name for key in LOG_CONFIG_DEF if explain_topic_key(key.name).is_ours}
    assert topics == {"diskless.enable", "flush.acks.all", "mirror.source"}
    assert "Kafka does not have it" in explain("max.partitions").text()


def test_the_types_are_kafkas():
    other = {
        name for name, key in KEYS.items() if ours(key).type.name.lower() != key.type
    }
    assert other == OUR_LISTS
    assert {KEYS[name].type for name in OUR_LISTS} == {"string"}


def test_the_defaults_are_kafkas_but_for_those_that_are_told():
    found = {}
    for name, key in KEYS.items():
        text = ours(key).format(ours(key).default)
        kafkas = sorted((key.default or "").split(","))  # of a map, in any order
        if sorted((text or "").split(",")) != kafkas and not (
            ours(key).type.name == "DOUBLE" and float(key.default) == ours(key).default
        ):
            found[name] = text
    assert found == OUR_DEFAULTS


def test_a_key_that_kafka_changes_while_it_serves_changes_here_too():
    fixed = {
        name
        for name, key in KEYS.items()
        if key.update_mode != "read-only"
        and ours(key).update_mode is UpdateMode.READ_ONLY
    }
    assert fixed == NOT_DYNAMIC


@pytest.mark.parametrize("name", ["request.timeout.ms", *UNUSED])
def test_a_key_without_effect_is_accepted_and_says_so_in_one_line(name):
    key = BROKER_CONFIG_DEF.key(name)
    text = KEYS[name].default or {"class": "C", "list": "broker"}.get(KEYS[name].type)
    config = BrokerConfig.load({name: text or "1"}, None, {"HOME": "/h"}, cores=2)
    (line,) = [each for each in config.warnings if each.startswith(f"{name} ")]
    assert line == f"{name} has no effect in mpbroker (the command line). {key.meaning}"
    assert explain(name, config).documentation == (
        "Has no effect, and is accepted for files and tools made for Kafka."
        f" {key.meaning}"
    )


def test_a_running_broker_takes_the_stores_of_keys_for_one_listener_only():
    assert {key.name for key in BROKER_CONFIG_DEF if key.only_per_listener} == {
        name
        for name, key in KEYS.items()
        if name.startswith(("ssl.key.", "ssl.keystore.", "ssl.truststore."))
    }


@pytest.mark.parametrize("name", ["ssl.keystore.type", "ssl.truststore.type"])
def test_a_type_of_stores_that_is_so_anyway_needs_no_warning(name):
    def warnings(text):
        return BrokerConfig.load({name: text}, None, {"HOME": "/h"}, cores=2).warnings

    assert [each for each in warnings("PEM") if name in each] == []
    assert [each for each in warnings("JKS") if name in each] != []
