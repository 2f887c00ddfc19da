"""The settings of Apache Kafka 4.4.0 that have no meaning for this broker.

They concern other brokers, controllers, classes of Java and the like. A file made for
Kafka may have them: each is accepted within Kafka's limits, changes nothing, and the
broker says so in one line. DescribeConfigs shows them, as Kafka does, and AlterConfigs
accepts a value where Kafka does.

A setting that gets a meaning here moves to the table of BrokerConfig
(broker_config.py).

Source: "Broker Configs" of the Apache Kafka 4.4 documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mpbroker.base.config_def import (
    LONG_MAX,
    ConfigType,
    ConfigValue,
    Validator,
    at_least,
    between,
    list_of,
    not_empty,
)
from mpbroker.config.broker_key import BrokerKey, Reader

_BOOLEAN: Final = ConfigType.BOOLEAN
_CLASS: Final = ConfigType.CLASS
_DOUBLE: Final = ConfigType.DOUBLE
_INT: Final = ConfigType.INT
_LIST: Final = ConfigType.LIST
_LONG: Final = ConfigType.LONG
_PASSWORD: Final = ConfigType.PASSWORD
_SHORT: Final = ConfigType.SHORT
_STRING: Final = ConfigType.STRING

# A key's name, type and default, and its limits if there are any.
_Row = (
    tuple[str, ConfigType, ConfigValue] | tuple[str, ConfigType, ConfigValue, Validator]
)


def _rows(
    reason: str, reader: Reader | None, *rows: _Row, **columns: Any
) -> Iterator[BrokerKey[Any]]:
    """Yield keys that have no effect here, all for the same reason.

    Args:
        reason: a sentence for the documentation.
        reader: decides about the update mode, as in Kafka. NONE: AlterConfigs accepts a
            value; SECURITY: it accepts one for this broker or for a listener; None: it
            accepts none.
        rows: the keys.
        columns: further columns of all rows; see BrokerKey.
    """
    make: Any = BrokerKey  # its overloads are for rows that become attributes
    if reader is not None:
        columns["reader"] = reader
    for name, kind, default, *limits in rows:
        limit = {"validator": limits[0]} if limits else {}
        yield make(name, kind, default, reason, has_effect=False, **limit, **columns)


def _rows_of_listeners(
    reason: str, reader: Reader | None, *rows: _Row
) -> Iterator[BrokerKey[Any]]:
    """Yield keys as ``_rows`` does, which can also be set for a single listener.

    Those that begin with "sasl." can also be set for one SASL mechanism.
    """
    for row in rows:
        of_sasl = row[0].startswith("sasl.")
        yield from _rows(reason, reader, row, per_listener=True, per_mechanism=of_sasl)


KEYS_WITHOUT_EFFECT: Final = (
    *_rows(
        "The remote store is set up by remote.storage.url, and has one process.",
        None,
        ("remote.log.index.file.cache.ttl.ms", _LONG, 900_000, at_least(-1)),
        ("remote.log.manager.copy.quota.window.num", _INT, 11, at_least(1)),
        ("remote.log.manager.copy.quota.window.size.seconds", _INT, 1, at_least(1)),
        ("remote.log.manager.fetch.quota.window.num", _INT, 11, at_least(1)),
        ("remote.log.manager.fetch.quota.window.size.seconds", _INT, 1, at_least(1)),
        ("remote.log.manager.thread.pool.size", _INT, 2, at_least(1)),
        ("remote.log.metadata.custom.metadata.max.bytes", _INT, 128, at_least(0)),
        (
            "remote.log.metadata.manager.class.name",
            _STRING,
            "org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager",
            not_empty(),
        ),
        ("remote.log.metadata.manager.class.path", _STRING, None),
        (
            "remote.log.metadata.manager.impl.prefix",
            _STRING,
            "rlmm.config.",
            not_empty(),
        ),
        ("remote.log.metadata.manager.listener.name", _STRING, None, not_empty()),
        ("remote.log.reader.max.pending.tasks", _INT, 100, at_least(1)),
        ("remote.log.storage.manager.class.name", _STRING, None, not_empty()),
        ("remote.log.storage.manager.class.path", _STRING, None),
        ("remote.log.storage.manager.impl.prefix", _STRING, "rsm.config.", not_empty()),
    ),
    *_rows(
        "The remote store is set up by remote.storage.url, and has one process.",
        Reader.NONE,
        ("follower.fetch.last.tiered.offset.enable", _BOOLEAN, False),
        ("log.local.retention.bytes", _LONG, -2, at_least(-2)),
        ("log.local.retention.ms", _LONG, -2, at_least(-2)),
        ("remote.list.offsets.request.timeout.ms", _LONG, 30_000, at_least(1)),
        (
            "remote.log.index.file.cache.total.size.bytes",
            _LONG,
            1_073_741_824,
            at_least(1),
        ),
        ("remote.log.manager.expiration.thread.pool.size", _INT, 10, at_least(1)),
        ("remote.log.manager.follower.thread.pool.size", _INT, 2, at_least(1)),
    ),
    *_rows(
        "There are no other brokers.",
        Reader.NONE,
        ("follower.replication.throttled.rate", _LONG, LONG_MAX, at_least(0)),
        ("leader.replication.throttled.rate", _LONG, LONG_MAX, at_least(0)),
    ),
    *_rows(
        "There are no other brokers.",
        None,
        ("auto.leader.rebalance.enable", _BOOLEAN, True),
        ("leader.imbalance.check.interval.seconds", _LONG, 300, at_least(1)),
        ("replica.fetch.backoff.ms", _INT, 1000, at_least(0)),
        ("replica.fetch.max.bytes", _INT, 1_048_576, at_least(0)),
        ("replica.fetch.min.bytes", _INT, 1),
        ("replica.fetch.response.max.bytes", _INT, 10_485_760, at_least(0)),
        ("replica.fetch.wait.max.ms", _INT, 500),
        ("replica.high.watermark.checkpoint.interval.ms", _LONG, 5000),
        ("replica.lag.time.max.ms", _LONG, 30_000),
        ("replica.selector.class", _STRING, None),
        ("replica.socket.receive.buffer.bytes", _INT, 65_536),
        ("replica.socket.timeout.ms", _INT, 30_000),
        ("replication.quota.window.num", _INT, 11, at_least(1)),
        ("replication.quota.window.size.seconds", _INT, 1, at_least(1)),
        ("unclean.leader.election.interval.ms", _LONG, 300_000, at_least(1)),
    ),
    *_rows(
        "The broker is its own controller.",
        None,
        ("broker.heartbeat.interval.ms", _INT, 2000),
        ("broker.session.timeout.ms", _INT, 9000),
        ("controller.performance.always.log.threshold.ms", _LONG, 2000, at_least(0)),
        ("controller.performance.sample.period.ms", _LONG, 60_000, at_least(100)),
        ("controller.quorum.append.linger.ms", _INT, 25, at_least(0)),
        ("controller.quorum.auto.join.enable", _BOOLEAN, False),
        ("controller.quorum.bootstrap.servers", _LIST, ()),
        ("controller.quorum.election.backoff.max.ms", _INT, 1000, at_least(0)),
        ("controller.quorum.election.timeout.ms", _INT, 1000, at_least(0)),
        ("controller.quorum.fetch.max.bytes", _INT, 1_048_576, at_least(1)),
        ("controller.quorum.fetch.snapshot.max.bytes", _INT, 1_048_576, at_least(1)),
        ("controller.quorum.fetch.timeout.ms", _INT, 2000, at_least(0)),
        ("controller.quorum.request.timeout.ms", _INT, 2000, at_least(0)),
        ("controller.quorum.retry.backoff.ms", _INT, 20, at_least(0)),
        ("controller.quorum.voters", _LIST, ()),
        ("controller.socket.timeout.ms", _INT, 30_000),
        ("early.start.listeners", _LIST, None),
        ("initial.broker.registration.timeout.ms", _INT, 60_000),
        ("process.roles", _LIST, (), list_of("broker", "controller")),
        ("server.max.startup.time.ms", _LONG, LONG_MAX, at_least(0)),
    ),
    *_rows_of_listeners(
        "The broker is its own controller.",
        None,
        ("sasl.mechanism.controller.protocol", _STRING, "GSSAPI"),
    ),
    *_rows(
        "The metadata log is kept by rules of its own.",
        None,
        ("internal.metadata.delete.delay.millis", _LONG, 60_000),
        ("internal.metadata.log.segment.bytes", _INT, None),
        ("internal.metadata.max.batch.size.in.bytes", _INT, 8_388_608),
        ("metadata.log.dir", _STRING, None),
        (
            "metadata.log.max.record.bytes.between.snapshots",
            _LONG,
            20_971_520,
            at_least(1),
        ),
        ("metadata.log.max.snapshot.interval.ms", _LONG, 3_600_000, at_least(0)),
        ("metadata.log.segment.bytes", _INT, 1_073_741_824, at_least(8388608)),
        ("metadata.log.segment.ms", _LONG, 604_800_000),
        ("metadata.max.idle.interval.ms", _INT, 500, at_least(0)),
        ("metadata.max.retention.bytes", _LONG, 104_857_600),
        ("metadata.max.retention.ms", _LONG, 604_800_000),
    ),
    *_rows(
        "Partitions move one at a time, and as fast as the disks let them.",
        None,
        ("alter.log.dirs.replication.quota.window.num", _INT, 11, at_least(1)),
        ("alter.log.dirs.replication.quota.window.size.seconds", _INT, 1, at_least(1)),
        ("num.replica.alter.log.dirs.threads", _INT, None),
    ),
    *_rows(
        "Partitions move one at a time, and as fast as the disks let them.",
        Reader.NONE,
        (
            "replica.alter.log.dirs.io.max.bytes.per.second",
            _LONG,
            LONG_MAX,
            at_least(0),
        ),
    ),
    *_rows(
        "A log directory is not excluded from new partitions.",
        Reader.SECURITY,
        ("cordoned.log.dirs", _LIST, ()),
    ),
    *_rows(
        "There is no other controller to tell about a failed directory.",
        None,
        ("log.dir.failure.timeout.ms", _LONG, 30_000, at_least(1)),
    ),
    *_rows(
        "A page of DescribeTopicPartitions has at most 2000 partitions.",
        None,
        ("max.request.partition.size.limit", _INT, 2000, at_least(1)),
    ),
    *_rows(
        "A request that is answered leaves the purgatory at once.",
        None,
        ("delete.records.purgatory.purge.interval.requests", _INT, 1),
        ("fetch.purgatory.purge.interval.requests", _INT, 1000),
        ("producer.purgatory.purge.interval.requests", _INT, 1000),
        ("share.fetch.purgatory.purge.interval.requests", _INT, 1000),
    ),
    *_rows(
        "The coordinator keeps the state of share groups without it.",
        None,
        ("group.share.initialize.retry.interval.ms", _INT, 30_000, at_least(1)),
        (
            "group.share.persister.class.name",
            _STRING,
            "org.apache.kafka.server.share.persister.DefaultStatePersister",
        ),
        ("share.coordinator.append.linger.ms", _INT, -1, at_least(-1)),
        (
            "share.coordinator.cold.partition.snapshot.interval.ms",
            _INT,
            300_000,
            at_least(1),
        ),
        ("share.coordinator.state.topic.compression.codec", _INT, 0),
        ("share.coordinator.state.topic.prune.interval.ms", _INT, 300_000, at_least(1)),
        ("share.coordinator.threads", _INT, 1, at_least(1)),
        ("share.coordinator.write.timeout.ms", _INT, 5000, at_least(1)),
    ),
    *_rows(
        "The coordinator keeps the state of share groups without it.",
        Reader.NONE,
        (
            "share.coordinator.cached.buffer.max.bytes",
            _INT,
            1_048_588,
            at_least(524288),
        ),
    ),
    *_rows(
        "Share groups have no dead-letter queue.",
        Reader.NONE,
        ("errors.deadletterqueue.auto.create.topics.enable", _BOOLEAN, False),
        ("errors.deadletterqueue.topic.name.prefix", _STRING, "dlq."),
    ),
    *_rows(
        "Streams groups have one assignor, which does not look at racks.",
        None,
        ("group.streams.assignors", _LIST, ("sticky",), not_empty()),
        ("group.streams.rack.aware.assignment.tags", _LIST, ()),
    ),
    *_rows(
        "A group is assigned anew as soon as its members change.",
        None,
        ("group.consumer.max.assignment.interval.ms", _INT, 15_000, at_least(0)),
        ("group.consumer.min.assignment.interval.ms", _INT, 0, at_least(0)),
    ),
    *_rows(
        "A group is assigned anew as soon as its members change.",
        Reader.NONE,
        ("group.consumer.assignment.interval.ms", _INT, 1000, at_least(0)),
    ),
    *_rows(
        "A group's pattern is matched anew when topics change.",
        None,
        ("group.consumer.regex.refresh.interval.ms", _INT, 600_000, at_least(10000)),
    ),
    *_rows(
        "One coordinator process writes the changes that wait in one batch.",
        None,
        ("group.coordinator.append.linger.ms", _INT, -1, at_least(-1)),
        ("group.coordinator.background.threads", _INT, 2, at_least(1)),
    ),
    *_rows(
        "One coordinator process writes the changes that wait in one batch.",
        Reader.NONE,
        (
            "group.coordinator.cached.buffer.max.bytes",
            _INT,
            1_048_588,
            at_least(524288),
        ),
    ),
    *_rows(
        "The coordinator adds partitions without asking another broker.",
        None,
        ("add.partitions.to.txn.retry.backoff.max.ms", _INT, 100, at_least(0)),
        ("add.partitions.to.txn.retry.backoff.ms", _INT, 20, at_least(1)),
    ),
    *_rows(
        "Two-phase commit is not served.",
        None,
        ("transaction.two.phase.commit.enable", _BOOLEAN, False),
    ),
    *_rows(
        "Metrics are counters, of which no samples are kept.",
        None,
        ("kafka.metrics.polling.interval.secs", _INT, 10, at_least(1)),
        ("metrics.num.samples", _INT, 2, at_least(1)),
        ("metrics.recording.level", _STRING, "INFO"),
        ("metrics.sample.window.ms", _LONG, 30_000, at_least(1)),
    ),
    *_rows(
        "Only released versions of requests and features are offered.",
        None,
        ("unstable.api.versions.enable", _BOOLEAN, False),
        ("unstable.feature.versions.enable", _BOOLEAN, False),
    ),
    *_rows(
        "Classes of Java are not loaded.",
        None,
        ("alter.config.policy.class.name", _CLASS, None),
        ("client.quota.callback.class", _CLASS, None),
        ("create.topic.policy.class.name", _CLASS, None),
        ("group.streams.topology.description.plugin.class", _CLASS, None),
        ("kafka.metrics.reporters", _LIST, ()),
        ("security.providers", _STRING, None),
    ),
    *_rows_of_listeners(
        "Classes of Java are not loaded.",
        None,
        ("sasl.client.callback.handler.class", _CLASS, None),
        ("sasl.login.callback.handler.class", _CLASS, None),
        ("sasl.login.class", _CLASS, None),
        (
            "sasl.oauthbearer.jwt.retriever.class",
            _CLASS,
            "org.apache.kafka.common.security.oauthbearer.DefaultJwtRetriever",
        ),
        (
            "sasl.oauthbearer.jwt.validator.class",
            _CLASS,
            "org.apache.kafka.common.security.oauthbearer.DefaultJwtValidator",
        ),
        ("sasl.server.callback.handler.class", _CLASS, None),
    ),
    *_rows(
        "Classes of Java are not loaded.",
        Reader.NONE,
        ("metric.reporters", _LIST, ("org.apache.kafka.common.metrics.JmxReporter",)),
    ),
    *_rows_of_listeners(
        "Classes of Java are not loaded.",
        Reader.SECURITY,
        (
            "principal.builder.class",
            _CLASS,
            "org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder",
        ),
        ("ssl.engine.factory.class", _CLASS, None),
        ("ssl.keymanager.algorithm", _STRING, "SunX509"),
        ("ssl.provider", _STRING, None),
        ("ssl.secure.random.implementation", _STRING, None),
        ("ssl.trustmanager.algorithm", _STRING, "PKIX"),
    ),
    *_rows_of_listeners(
        "Where no issuer, or no audience, is expected, a token may have any.",
        None,
        ("sasl.oauthbearer.allow.unverified.audience", _BOOLEAN, False),
        ("sasl.oauthbearer.allow.unverified.issuer", _BOOLEAN, False),
    ),
    *_rows_of_listeners(
        "Kerberos (GSSAPI) is not served.",
        Reader.SECURITY,
        ("sasl.kerberos.kinit.cmd", _STRING, "/usr/bin/kinit"),
        ("sasl.kerberos.min.time.before.relogin", _LONG, 60_000),
        ("sasl.kerberos.principal.to.local.rules", _LIST, ("DEFAULT",)),
        ("sasl.kerberos.service.name", _STRING, None),
        ("sasl.kerberos.ticket.renew.jitter", _DOUBLE, 0.05),
        ("sasl.kerberos.ticket.renew.window.factor", _DOUBLE, 0.8),
    ),
    *_rows_of_listeners(
        "The broker logs in to no other broker.",
        None,
        ("sasl.login.connect.timeout.ms", _INT, None),
        ("sasl.login.read.timeout.ms", _INT, None),
        ("sasl.login.retry.backoff.max.ms", _LONG, 10_000),
        ("sasl.login.retry.backoff.ms", _LONG, 100),
        ("sasl.oauthbearer.assertion.algorithm", _STRING, "RS256"),
        ("sasl.oauthbearer.assertion.claim.aud", _STRING, None),
        ("sasl.oauthbearer.assertion.claim.exp.seconds", _INT, 300, between(0, 86400)),
        ("sasl.oauthbearer.assertion.claim.iss", _STRING, None),
        ("sasl.oauthbearer.assertion.claim.jti.include", _BOOLEAN, False),
        ("sasl.oauthbearer.assertion.claim.nbf.seconds", _INT, 60, between(0, 3600)),
        ("sasl.oauthbearer.assertion.claim.sub", _STRING, None),
        ("sasl.oauthbearer.assertion.file", _STRING, None),
        ("sasl.oauthbearer.assertion.private.key.file", _STRING, None),
        ("sasl.oauthbearer.assertion.private.key.passphrase", _PASSWORD, None),
        ("sasl.oauthbearer.assertion.template.file", _STRING, None),
        ("sasl.oauthbearer.client.credentials.client.id", _STRING, None),
        ("sasl.oauthbearer.client.credentials.client.secret", _PASSWORD, None),
        ("sasl.oauthbearer.scope", _STRING, None),
        ("sasl.oauthbearer.token.endpoint.url", _STRING, None),
    ),
    *_rows_of_listeners(
        "The broker logs in to no other broker.",
        Reader.SECURITY,
        ("sasl.login.refresh.buffer.seconds", _SHORT, 300),
        ("sasl.login.refresh.min.period.seconds", _SHORT, 60),
        ("sasl.login.refresh.window.factor", _DOUBLE, 0.8),
        ("sasl.login.refresh.window.jitter", _DOUBLE, 0.05),
        ("ssl.endpoint.identification.algorithm", _STRING, "https"),
    ),
    *_rows(
        "The broker connects to no other broker.",
        None,
        ("socket.connection.setup.timeout.max.ms", _LONG, 30_000),
        ("socket.connection.setup.timeout.ms", _LONG, 10_000),
    ),
    *_rows_of_listeners(
        "A changed key store is used, whatever names are in it.",
        None,
        ("ssl.allow.dn.changes", _BOOLEAN, False),
        ("ssl.allow.san.changes", _BOOLEAN, False),
    ),
)
