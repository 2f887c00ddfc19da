"""Parse the options of ``format("mpbroker")``.

Names, defaults and rules are those of Spark's Kafka connector, so a query moves between
the two by changing the format's name. docs/spark.md has a table of all options. Their
names are case-insensitive. An unknown option is ignored with a warning, as Kafka's
consumer does; Spark's connector ignores it in silence.

Source: Spark's "Structured Streaming + Kafka Integration Guide".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

import orjson

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address, parse_addresses
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED
from mpbroker.client.errors import AddressError
from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings
from mpbroker.spark.topic_pattern import TopicPatternError, compile_topic_pattern

logger = logging.getLogger(__name__)

LATEST: Final = -1
EARLIEST: Final = -2

_PREFIX: Final = "kafka."
_GROUP_ID: Final = "kafka.group.id"
_GROUP_PREFIX: Final = "groupIdPrefix"
# Options that Spark's connector refuses because it sets them itself, and what to use.
_REFUSED: Final = {
    "kafka.auto.offset.reset": "use startingOffsets, or a checkpoint",
    "kafka.key.deserializer": "keys are bytes; convert the column",
    "kafka.value.deserializer": "values are bytes; convert the column",
    "kafka.key.serializer": "cast the key column to binary or string",
    "kafka.value.serializer": "cast the value column to binary or string",
    "kafka.enable.auto.commit": "offsets are kept in the checkpoint",
    "kafka.interceptor.classes": "interceptors could break the query",
}
# The options that the source knows, besides those that begin with ``kafka.``.
SOURCE_OPTIONS: Final = (
    "assign",
    "subscribe",
    "subscribePattern",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "endingOffsets",
    "failOnDataLoss",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    _GROUP_PREFIX,
    "includeHeaders",
    "commitGroup",  # not in Spark's connector
)
_STRATEGIES: Final = ("subscribe", "subscribepattern", "assign")
_INTEGER_MAX: Final = (1 << 63) - 1


class OptionError(MpbrokerError):
    """An option is missing or wrong; the message says which, and what is right."""


class Subscription(NamedTuple):
    """The partitions that a query reads; exactly one of the three fields is set.

    Attributes:
        topics: read all partitions of these topics.
        pattern: read all topics whose name has a match of this regular expression of
            Java anywhere (`compile_topic_pattern`).
        partitions: read these partitions only.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[TopicPartition, ...] = ()


class OffsetRequest(NamedTuple):
    """The point in each partition at which a query starts or ends.

    The first field that is set applies, in this order: ``timestamp_ms`` for all
    partitions, ``timestamps`` by partition, ``offsets`` by partition, ``everywhere``
    (EARLIEST or LATEST) for all partitions. Timestamps are in ms since 1970.
    """

    everywhere: int = LATEST
    offsets: Mapping[TopicPartition, int] | None = None
    timestamps: Mapping[TopicPartition, int] | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True)
class SourceOptions:
    """The checked options of a query; Spark pickles them to its executors."""

    bootstrap: tuple[Address, ...]
    subscription: Subscription
    starting: OffsetRequest
    ending: OffsetRequest
    unmatched_timestamp_is_latest: bool = False
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    poll_timeout_ms: int = 120_000
    fetch_retries: int = 3
    fetch_retry_interval_ms: int = 10
    isolation_level: int = READ_UNCOMMITTED
    partition_max_bytes: int = 4 * 1024 * 1024
    request_timeout_ms: int = 30_000
    client: ClientSettings | None = None
    commit_group: str | None = None


def parse_source_options(
    options: Mapping[str, str], *, streaming: bool
) -> SourceOptions:
    """Parse and check the options of a query.

    Args:
        streaming: whether the query is a stream. A stream has no end, and starts at
            LATEST by default; a batch query starts at EARLIEST and ends at LATEST.

    Raises:
        OptionError: an option is missing or wrong.
    """
    given = {name.lower(): value for name, value in options.items()}
    refuse_reserved(given)
    if streaming:
        for name in ("endingoffsets", "endingoffsetsbytimestamp", "endingtimestamp"):
            if name in given:
                raise OptionError(f"{name} is not valid in streaming queries")
    _warn_of_unknown(given)
    starting = parse_offset_request(
        given, "starting", LATEST if streaming else EARLIEST
    )
    if not streaming and asks_for(starting, LATEST):
        raise OptionError(
            "startingOffsets must not be latest in a batch query: it would read"
            " nothing; use earliest or offsets"
        )
    ending = parse_offset_request(given, "ending", LATEST)
    if asks_for(ending, EARLIEST):
        raise OptionError(
            "endingOffsets must not be earliest: nothing would be read; use latest or"
            " offsets"
        )
    least = parse_integer(given, "minOffsetsPerTrigger", 1)
    most = parse_integer(given, "maxOffsetsPerTrigger", 1)
    if streaming and least is not None and most is not None and least > most:
        raise OptionError(
            f"minOffsetsPerTrigger={least} is greater than maxOffsetsPerTrigger={most}:"
            " each batch would wait for maxTriggerDelay; give a smaller one"
        )
    return SourceOptions(
        bootstrap=parse_bootstrap(given),
        subscription=parse_subscription(given),
        starting=starting,
        ending=ending,
        unmatched_timestamp_is_latest=parse_choice(
            given, "startingOffsetsByTimestampStrategy", ("error", "latest")
        )
        == "latest",
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=_duration(given, "maxTriggerDelay", 15 * 60_000),
        min_partitions=parse_integer(given, "minPartitions", 1),
        max_records_per_partition=parse_integer(given, "maxRecordsPerPartition", 1),
        fail_on_data_loss=parse_boolean(given, "failOnDataLoss", True),
        include_headers=parse_boolean(given, "includeHeaders", False),
        poll_timeout_ms=parse_integer(given, "kafkaConsumer.pollTimeoutMs", 0)
        or 120_000,
        fetch_retries=or_default(parse_integer(given, "fetchOffset.numRetries", 1), 3),
        fetch_retry_interval_ms=or_default(
            parse_integer(given, "fetchOffset.retryIntervalMs", 0), 10
        ),
        isolation_level=READ_COMMITTED
        if parse_choice(
            given, "kafka.isolation.level", ("read_uncommitted", "read_committed")
        )
        == "read_committed"
        else READ_UNCOMMITTED,
        partition_max_bytes=or_default(
            parse_integer(given, "kafka.max.partition.fetch.bytes", 1), 4 * 1024 * 1024
        ),
        request_timeout_ms=or_default(
            parse_integer(given, "kafka.request.timeout.ms", 1), 30_000
        ),
        client=parse_client_settings(given),
        commit_group=_commit_group(given),
    )


def _warn_of_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in SOURCE_OPTIONS}
    for name in given:
        if name.startswith(_PREFIX):
            if name not in _UNDERSTOOD:
                logger.warning("option %s has no meaning here and is ignored", name)
        elif name not in known:
            near = get_close_matches(name, known, n=1)
            logger.warning(
                "option %s is unknown and is ignored%s",
                name,
                f"; did you mean {known[near[0]]}?" if near else "",
            )


def _commit_group(given: Mapping[str, str]) -> str | None:
    """Return the id of the group whose offsets a stream stores; None: of none.

    No other request has a group's id, so the connector's two options about groups have
    an effect here only: a user whose rights are to groups of a prefix needs no other.

    Raises:
        OptionError: the id is empty, or two are given.
    """
    group, own = given.get("commitgroup"), given.get(_GROUP_ID)
    prefix = given.get(_GROUP_PREFIX.lower(), "")
    if group is None:
        for name in (_GROUP_ID, _GROUP_PREFIX):
            if name.lower() in given:
                logger.warning(
                    "option %s has no effect without commitGroup: a query joins no"
                    " group, and needs no right to one",
                    name,
                )
        return None
    if not group.strip():
        raise OptionError(
            "commitGroup is empty; name a consumer group, or leave it out"
        )
    if own is not None and own != group:
        raise OptionError(
            f"commitGroup={group!r} and kafka.group.id={own!r} name two groups; give"
            " one of them, or the same group"
        )
    if own is not None or not prefix:
        return group  # as in Spark's connector, an id counts more than a prefix
    return f"{prefix}-{group}"


def parse_client_settings(given: Mapping[str, str]) -> ClientSettings:
    """Parse the ``kafka.`` options that all clients have: addresses, security...

    Args:
        given: options by name in lower case.

    Raises:
        OptionError: an option is missing or wrong.
    """
    parse_bootstrap(given)
    settings = {
        name.removeprefix(_PREFIX): value
        for name, value in given.items()
        if name.removeprefix(_PREFIX) in ADMIN_CONFIG and name.startswith(_PREFIX)
    }
    try:
        return ClientSettings.of(parse_settings(ADMIN_CONFIG, settings), 1)
    except ConfigError as error:
        raise OptionError(f"kafka.{error}") from None


def refuse_reserved(given: Mapping[str, str]) -> None:
    """Refuse options that the source and the sink set themselves.

    Args:
        given: options by name in lower case.

    Raises:
        OptionError: one of these options is given.
    """
    for name, reason in _REFUSED.items():
        if name in given:
            raise OptionError(f"{name} is not supported: {reason}")


_UNDERSTOOD: Final = {
    "kafka.bootstrap.servers",
    "kafka.isolation.level",
    "kafka.max.partition.fetch.bytes",
    _GROUP_ID,
    *(f"kafka.{key.name}" for key in ADMIN_CONFIG),
}


def parse_bootstrap(given: Mapping[str, str]) -> tuple[Address, ...]:
    """Parse kafka.bootstrap.servers.

    Args:
        given: options by name in lower case.

    Raises:
        OptionError: the option is not set, or holds no addresses.
    """
    text = given.get("kafka.bootstrap.servers")
    if not text:
        raise OptionError(
            "kafka.bootstrap.servers is not set; give HOST:PORT[,HOST:PORT...]"
        )
    try:
        return tuple(parse_addresses(text))
    except AddressError as error:
        raise OptionError(f"kafka.bootstrap.servers: {error}") from None


def parse_subscription(given: Mapping[str, str]) -> Subscription:
    """Parse the option subscribe, subscribePattern or assign, whichever is given.

    Args:
        given: options by name in lower case.

    Raises:
        OptionError: none or several are given, or the value is wrong.
    """
    chosen = [name for name in _STRATEGIES if name in given]
    if len(chosen) != 1:
        found = f"{', '.join(chosen)} are given" if chosen else "none is given"
        raise OptionError(
            f"exactly one of subscribe, subscribePattern and assign is needed; {found}"
        )
    value = given[chosen[0]].strip()
    if chosen[0] == "subscribe":
        topics = tuple(name.strip() for name in value.split(",") if name.strip())
        if not topics:
            raise OptionError(f"subscribe={value!r} names no topic; give T1,T2")
        return Subscription(topics=topics)
    if chosen[0] == "subscribepattern":
        if not value:
            raise OptionError("subscribePattern is empty; give a regular expression")
        try:
            compile_topic_pattern(value)
        except TopicPatternError as error:
            raise OptionError(
                f"subscribePattern={value!r} is no regular expression of Java that can"
                f" be used: {error}"
            ) from None
        return Subscription(pattern=value)
    topics_given = _json(value, "assign", '{"topic":[0,1]}')
    partitions = []
    for topic, numbers in topics_given.items():
        if not isinstance(numbers, list) or not all(map(_is_partition, numbers)):
            raise _unreadable("assign", value, '{"topic":[0,1]}')
        partitions += [TopicPartition(topic, number) for number in numbers]
    if not partitions:
        raise OptionError(f"assign={value!r} names no partition")
    return Subscription(partitions=tuple(sorted(set(partitions))))


def parse_offset_request(
    given: Mapping[str, str], side: str, default: int
) -> OffsetRequest:
    """Parse the options that say where a query starts or ends.

    Args:
        given: options by name in lower case.
        side: "starting" or "ending", with which the options' names begin.
        default: EARLIEST or LATEST, where no option is given.

    Raises:
        OptionError: a value is wrong.
    """
    timestamp = parse_integer(given, f"{side}Timestamp", 0)
    if timestamp is not None:
        return OffsetRequest(timestamp_ms=timestamp)
    name = f"{side}OffsetsByTimestamp"
    text = given.get(name.lower())
    if text is not None:
        return OffsetRequest(timestamps=_by_partition(text, name, lowest=0))
    name = f"{side}Offsets"
    text = given.get(name.lower())
    if text is None:
        return OffsetRequest(everywhere=default)
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return OffsetRequest(everywhere=EARLIEST if word == "earliest" else LATEST)
    return OffsetRequest(offsets=_by_partition(text, name, lowest=EARLIEST))


def asks_for(request: OffsetRequest, word: int) -> bool:
    """Return whether a query starts or ends at ``word`` in any partition.

    Args:
        word: EARLIEST or LATEST.
    """
    if request.timestamp_ms is not None or request.timestamps is not None:
        return False
    if request.offsets is not None:
        return word in request.offsets.values()
    return request.everywhere == word


def _by_partition(text: str, name: str, lowest: int) -> dict[TopicPartition, int]:
    example = '{"topic":{"0":23,"1":-2}}' if lowest else '{"topic":{"0":1700000000000}}'
    found: dict[TopicPartition, int] = {}
    for topic, entries in _json(text, name, example).items():
        if not isinstance(entries, dict):
            raise _unreadable(name, text, example)
        for number, value in entries.items():
            if not (number.isascii() and number.isdigit()) or not (
                isinstance(value, int)
                and not isinstance(value, bool)
                and lowest <= value <= _INTEGER_MAX
            ):
                raise _unreadable(name, text, example)
            found[TopicPartition(topic, int(number))] = value
    return found


def _json(text: str, name: str, example: str) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise _unreadable(name, text, example) from None
    if not isinstance(found, dict):
        raise _unreadable(name, text, example)
    return found


def _unreadable(name: str, value: str, example: str) -> OptionError:
    return OptionError(f"{name}={value!r} cannot be read; it looks like {example}")


def _is_partition(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_integer(given: Mapping[str, str], name: str, lowest: int) -> int | None:
    """Parse an integer option; return None if it is not given.

    Raises:
        OptionError: the value is not an integer from ``lowest`` to 2**63 - 1.
    """
    text = given.get(name.lower())
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= _INTEGER_MAX:
        raise OptionError(f"{name}={text!r} is not an integer of at least {lowest}")
    return value


def or_default(value: int | None, default: int) -> int:
    """Return a value, or the default for None; ``or`` would replace 0 too."""
    return default if value is None else value


def parse_boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise OptionError(f"{name}={text!r} is neither true nor false")
    return text == "true"


def parse_choice(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return an option's value in lower case; the first choice if it is not given.

    Raises:
        OptionError: the value is none of the choices.
    """
    value = given.get(name.lower(), choices[0]).lower()
    if value not in choices:
        raise OptionError(f"{name}={value!r} is none of {', '.join(choices)}")
    return value


# Source: timeStringAs of Spark's JavaUtils.
_UNITS_US: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


def _duration(given: Mapping[str, str], name: str, default_ms: int) -> int:
    text = given.get(name.lower())
    if text is None:
        return default_ms
    match = re.fullmatch(r"\s*(\d{1,12})\s*([a-z]*)\s*", text.lower())
    if match is None or (match[2] or "ms") not in _UNITS_US:
        raise OptionError(
            f"{name}={text!r} is not a duration such as 1d, 15m, 30s, 500ms"
        )
    return int(match[1]) * _UNITS_US[match[2] or "ms"] // 1_000
