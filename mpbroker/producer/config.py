"""The settings of a producer, with Kafka's names, defaults and rules.

Source: the "Producer Configs" of the Apache Kafka documentation; KIP-679 for how
idempotence goes together with acks, retries and max.in.flight; KIP-1030 for linger.ms.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
    between,
    one_of,
    utf8,
)
from mpbroker.client.settings import (
    COMMON_KEYS,
    INT_MAX,
    METRICS_PUSH_KEY,
    ClientSettings,
    Settings,
    integer,
    parse_settings,
    pick,
)
from mpbroker.protocol.records.compression import Codec

_log = logging.getLogger(__name__)

ACKS_ALL: Final = -1
# Kafka's names for producers without client.id: producer-1, producer-2, ...
_numbers = itertools.count(1)
_ACKS: Final = {"all": ACKS_ALL, "-1": ACKS_ALL, "0": 0, "1": 1}

# fmt: off
PRODUCER_CONFIG: Final = ConfigDef("producer setting", (
    *COMMON_KEYS,
    ConfigKey("acks", ConfigType.STRING, "all",
        "Which brokers must have a record before it is acknowledged.",
        validator=one_of(*_ACKS)),
    ConfigKey("batch.size", ConfigType.INT, 16_384,
        "Most bytes of a batch.", validator=at_least(0)),
    ConfigKey("buffer.memory", ConfigType.LONG, 33_554_432,
        "Most bytes of all records that are not acknowledged yet.",
        validator=at_least(0)),
    ConfigKey("compression.type", ConfigType.STRING, "none",
        "Codec of the batches.",
        validator=one_of("none", "gzip", "snappy", "lz4", "zstd")),
    ConfigKey("compression.gzip.level", ConfigType.INT, -1,
        "Level of gzip; -1 is its own default.", validator=between(-1, 9)),
    ConfigKey("compression.lz4.level", ConfigType.INT, 9,
        "Level of lz4; 9 is its fast mode, as in Kafka.", validator=between(1, 17)),
    ConfigKey("compression.zstd.level", ConfigType.INT, 3,
        "Level of zstd; a higher one is smaller and slower.",
        validator=between(-131_072, 22)),
    ConfigKey("delivery.timeout.ms", ConfigType.INT, 120_000,
        "A record that is not acknowledged after this time fails.",
        validator=at_least(0)),
    ConfigKey("enable.idempotence", ConfigType.BOOLEAN, True,
        "Write every record once, and in order."),
    METRICS_PUSH_KEY,
    ConfigKey("linger.ms", ConfigType.LONG, 5,
        "Longest wait for a batch to fill.", validator=at_least(0)),
    ConfigKey("max.block.ms", ConfigType.LONG, 60_000,
        "Longest wait of send() for metadata and memory.", validator=at_least(0)),
    ConfigKey("max.in.flight.requests.per.connection", ConfigType.INT, 5,
        "Most requests of a connection that are not answered yet.",
        validator=at_least(1)),
    ConfigKey("max.request.size", ConfigType.INT, 1_048_576,
        "Most bytes of a request, and so of a record.", validator=at_least(0)),
    ConfigKey("metadata.max.idle.ms", ConfigType.LONG, 300_000,
        "A topic that gets no record for so long is forgotten.",
        validator=at_least(5000)),
    ConfigKey("partitioner.adaptive.partitioning.enable", ConfigType.BOOLEAN, True,
        "Send more records to partitions whose brokers are faster."),
    ConfigKey("partitioner.availability.timeout.ms", ConfigType.LONG, 0,
        "Avoid partitions whose broker took no batch for so long; 0: never.",
        validator=at_least(0)),
    ConfigKey("partitioner.ignore.keys", ConfigType.BOOLEAN, False,
        "Choose partitions as if records had no keys."),
    ConfigKey("retries", ConfigType.INT, INT_MAX,
        "How often a batch is tried again, within delivery.timeout.ms.",
        validator=at_least(0)),
    ConfigKey("transaction.timeout.ms", ConfigType.INT, 60_000,
        "The broker aborts a transaction that is open for longer.",
        validator=at_least(1)),
    ConfigKey("transactional.id", ConfigType.STRING, None,
        "Name of the producer for transactions; None: it has no transactions.",
        validator=utf8()),
))
# fmt: on


class ProducerSettings(NamedTuple):
    """A producer's settings as plain values; see `PRODUCER_CONFIG`."""

    client: ClientSettings
    acks: int
    batch_size: int
    buffer_memory: int
    codec: Codec
    compression_level: int | None
    delivery_timeout_ms: int
    idempotent: bool
    linger_ms: int
    max_block_ms: int
    max_in_flight: int
    max_request_size: int
    metadata_max_idle_ms: int
    enable_metrics_push: bool
    partitioner_adaptive_partitioning_enable: bool
    partitioner_availability_timeout_ms: int
    partitioner_ignore_keys: bool
    retries: int
    transaction_timeout_ms: int
    transactional_id: str | None

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ProducerSettings:
        """Check the settings that a user gave, and return all settings.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(PRODUCER_CONFIG, given)
        explicit = {name.replace("_", ".") for name in given}
        acks = _ACKS[str(values["acks"])]
        max_in_flight = integer(values, "max.in.flight.requests.per.connection")
        codec = Codec.from_name(str(values["compression.type"]))
        client = ClientSettings.of(values, max_in_flight)
        if not client.client_id:
            name = values["transactional.id"] or next(_numbers)
            client = client._replace(client_id=f"producer-{name}")
        return pick(
            cls,
            values,
            client=client,
            acks=acks,
            codec=codec,
            compression_level=_level(values, codec),
            delivery_timeout_ms=_delivery_timeout(values, explicit),
            idempotent=_idempotence(values, explicit, acks, max_in_flight),
            linger_ms=min(integer(values, "linger.ms"), INT_MAX),
            max_in_flight=max_in_flight,
        )


def _idempotence(
    values: Settings, explicit: set[str], acks: int, max_in_flight: int
) -> bool:
    """Return whether the producer is idempotent.

    If acks or retries do not allow idempotence, the producer does without it. That is
    an error if the user asked for idempotence or for transactions.

    Raises:
        ConfigError: settings that the user gave contradict each other.
    """
    is_transactional = values["transactional.id"] is not None
    if values["transactional.id"] == "":
        raise ConfigError("transactional.id is empty; give a name, or leave it out")
    if values["enable.idempotence"] is not True:
        if is_transactional:
            raise ConfigError(
                "transactional.id needs enable.idempotence=true; leave that one out"
            )
        return False
    if max_in_flight > 5:
        raise ConfigError(
            f"max.in.flight.requests.per.connection={max_in_flight}: an idempotent"
            " producer may have 5; lower it, or set enable.idempotence=false"
        )
    conflict = ""
    if acks != ACKS_ALL:
        conflict = f"acks={acks}; it must be all"
    elif values["retries"] == 0:
        conflict = "retries=0; it must be 1 or more"
    if conflict and ("enable.idempotence" in explicit or is_transactional):
        raise ConfigError(f"enable.idempotence=true does not go with {conflict}")
    if conflict:
        _log.info("this producer is not idempotent because of %s", conflict)
    return not conflict


def _level(values: Settings, codec: Codec) -> int | None:
    level = values.get(f"compression.{codec.name.lower()}.level")
    if level == 0 and codec is Codec.GZIP:
        raise ConfigError("compression.gzip.level=0: it must be -1, or 1 to 9")
    return level if isinstance(level, int) else None


def _delivery_timeout(values: Settings, explicit: set[str]) -> int:
    delivery = integer(values, "delivery.timeout.ms")
    waits = integer(values, "linger.ms") + integer(values, "request.timeout.ms")
    lowest = min(waits, INT_MAX)
    if delivery >= lowest:
        return delivery
    if "delivery.timeout.ms" in explicit:
        raise ConfigError(
            f"delivery.timeout.ms={delivery}: it must be at least linger.ms +"
            f" request.timeout.ms = {lowest}; raise it, or lower those"
        )
    return lowest
