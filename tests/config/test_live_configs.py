"""Whatever Kafka can change while it serves can be changed here, or is named below.

The list is Kafka's own: the keys whose "Update Mode" is cluster-wide or per-broker in
"Broker Configs" of the documentation of 4.1. That each is taken and told by a broker is
in tests/broker/test_dynamic_configs.py and test_live_security.py.
"""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import UpdateMode
from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.config.broker_key import Reader, reader_of

CLUSTER_WIDE = [
    "background.threads",
    "compression.gzip.level",
    "compression.lz4.level",
    "compression.type",
    "compression.zstd.level",
    "log.cleaner.backoff.ms",
    "log.cleaner.dedupe.buffer.size",
    "log.cleaner.delete.retention.ms",
    "log.cleaner.io.buffer.load.factor",
    "log.cleaner.io.buffer.size",
    "log.cleaner.io.max.bytes.per.second",
    "log.cleaner.max.compaction.lag.ms",
    "log.cleaner.min.cleanable.ratio",
    "log.cleaner.min.compaction.lag.ms",
    "log.cleaner.threads",
    "log.cleanup.policy",
    "log.flush.interval.messages",
    "log.flush.interval.ms",
    "log.index.interval.bytes",
    "log.index.size.max.bytes",
    "log.message.timestamp.after.max.ms",
    "log.message.timestamp.before.max.ms",
    "log.message.timestamp.type",
    "log.local.retention.bytes",
    "log.local.retention.ms",
    "log.preallocate",
    "log.retention.bytes",
    "log.retention.ms",
    "log.roll.jitter.ms",
    "log.roll.ms",
    "log.segment.bytes",
    "log.segment.delete.delay.ms",
    "max.connection.creation.rate",
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "message.max.bytes",
    "min.insync.replicas",
    "num.io.threads",
    "num.network.threads",
    "num.recovery.threads.per.data.dir",
    "num.replica.fetchers",
    "producer.id.expiration.ms",
    "remote.fetch.max.wait.ms",
    "remote.log.manager.copier.thread.pool.size",
    "remote.log.manager.copy.max.bytes.per.second",
    "remote.log.manager.fetch.max.bytes.per.second",
    "remote.log.reader.threads",
    "transaction.partition.verification.enable",
    "unclean.leader.election.enable",
]

OF_A_LISTENER = [
    "sasl.enabled.mechanisms",
    "sasl.jaas.config",
    "ssl.cipher.suites",
    "ssl.client.auth",
    "ssl.enabled.protocols",
    "ssl.key.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.keystore.type",
    "ssl.protocol",
    "ssl.truststore.certificates",
    "ssl.truststore.location",
    "ssl.truststore.password",
    "ssl.truststore.type",
]

# What they set is not here: they are accepted, and say so.
WITHOUT_EFFECT = {
    "classes of the JVM": """
        metric.reporters principal.builder.class ssl.engine.factory.class
        ssl.keymanager.algorithm ssl.provider ssl.secure.random.implementation
        ssl.trustmanager.algorithm
    """,
    "a client's, between brokers": """
        sasl.login.refresh.buffer.seconds sasl.login.refresh.min.period.seconds
        sasl.login.refresh.window.factor sasl.login.refresh.window.jitter
        ssl.endpoint.identification.algorithm
    """,
    "Kerberos": """
        sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin
        sasl.kerberos.principal.to.local.rules sasl.kerberos.service.name
        sasl.kerberos.ticket.renew.jitter sasl.kerberos.ticket.renew.window.factor
    """,
    "tiered storage": """
        remote.list.offsets.request.timeout.ms
        remote.log.index.file.cache.total.size.bytes
        remote.log.manager.expiration.thread.pool.size
    """,
}
# Per-broker by name only: without ZooKeeper, Kafka refuses to change them as well.
REFUSED_BY_KAFKA_TOO = [
    "advertised.listeners",
    "listener.security.protocol.map",
    "listeners",
]
# What Kafka lets set for one listener alone, of those above.
OF_ONE_LISTENER_TOO = [
    "max.connection.creation.rate",
    "max.connections",
    "num.network.threads",
]


@pytest.mark.parametrize(
    "name", [*CLUSTER_WIDE, "sasl.mechanism.inter.broker.protocol"]
)
def test_what_kafka_changes_for_brokers_has_somebody_who_reads_it_again(name):
    key = BROKER_CONFIG_DEF.key(name)
    assert reader_of(key) is not None
    assert key.update_mode is not UpdateMode.READ_ONLY


@pytest.mark.parametrize("name", OF_A_LISTENER)
def test_what_kafka_changes_for_a_listener_changes_there(name):
    key = BROKER_CONFIG_DEF.key(name)
    assert reader_of(key) is Reader.SECURITY
    assert key.update_mode is UpdateMode.PER_BROKER
    prefixed = BROKER_CONFIG_DEF.of_listener(f"listener.name.external.{name}")
    assert prefixed is not None and prefixed[1].name == name


@pytest.mark.parametrize("name", OF_ONE_LISTENER_TOO)
def test_what_may_be_one_listeners_alone_has_such_a_name(name):
    assert BROKER_CONFIG_DEF.key(name).per_listener
    assert BROKER_CONFIG_DEF.of_listener(f"listener.name.external.{name}") is not None


def test_what_kafka_changes_and_is_not_here_changes_nothing_and_says_so():
    for names in WITHOUT_EFFECT.values():
        for name in names.split():
            key = BROKER_CONFIG_DEF.key(name)
            assert key.update_mode is not UpdateMode.READ_ONLY
            assert not key.has_effect


def test_what_kafka_refuses_to_change_is_refused():
    for name in REFUSED_BY_KAFKA_TOO:
        assert BROKER_CONFIG_DEF.key(name).update_mode is UpdateMode.READ_ONLY
