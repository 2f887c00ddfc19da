"""CreateTopics: check all topics of a request, then create them with one write.

Source: Kafka protocol guide, "CreateTopics"; ReplicationControlManager.createTopics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from mpbroker.base.config_def import ConfigKey
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.metadata.topics import (
    MAX_PARTITIONS_PER_BATCH,
    NewTopic,
    Topic,
    TopicRegistry,
)
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.server.configs.config_entries import BrokerConfigs
from mpbroker.server.configs.config_resources import broker_configs
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import Broker, HandlerContext
from mpbroker.server.intent import id_words, noted_ids

# KIP-464 defines -1 for version 4; like Kafka's broker, accept it in every version.
_BROKER_DEFAULT: Final = -1
_CONFIGS_SINCE: Final = 5  # KIP-525


def handle_create_topics(
    request: CreateTopicsRequest, context: HandlerContext
) -> CreateTopicsResponse:
    """Create each topic for which the request is valid; answer each topic once.

    The ids of the new topics are noted before the write (intent.py). So a second
    execution after the death of a handler knows what the first one has created. If the
    metadata log cannot be written, no topic is created.
    """
    too_many = _too_many(request, context.broker.num_partitions)
    if too_many is not None:
        names = dict.fromkeys(topic.name for topic in request.topics)
        return CreateTopicsResponse(topics=[_refusal(name, too_many) for name in names])
    registry, intent, version = context.broker.registry, context.intent, context.version
    earlier = noted_ids(intent.earlier())

    def about_to(drafted: list[Topic | ApiError]) -> None:
        made = (each.topic_id for each in drafted if not isinstance(each, ApiError))
        intent.note(id_words([*earlier, *made]))

    named = Counter(topic.name for topic in request.topics)
    results: dict[str, CreatableTopicResult] = {}
    wanted: list[NewTopic] = []
    for topic in request.topics:
        try:
            if named[topic.name] > 1:
                raise invalid_request(
                    f"Create topics request from client contains duplicate topic"
                    f" {topic.name}.",
                )
            new = _new_topic(topic, context.broker)
        except ApiError as error:
            results[topic.name] = _refusal(topic.name, error)
        else:
            wanted.append(new)
            results[topic.name] = CreatableTopicResult()
    permit = context.mutation_permit(strict_since=6)
    if permit is not None:
        wanted = _permitted(wanted, registry, permit, results)
    created: Sequence[Topic | ApiError]
    try:
        created = registry.create_topics(
            wanted, validate_only=request.validate_only, about_to=about_to
        )
    except ApiError as error:  # the disk has failed, and nothing was created
        created = [error] * len(wanted)
    described = _Described(registry.default_config, broker_configs(context.broker))
    for new, outcome in zip(wanted, created, strict=True):
        made = registry.topic(new.name) if earlier else None
        if not isinstance(outcome, ApiError):
            results[new.name] = _success(outcome, version, described)
        elif made is not None and made.topic_id in earlier:
            results[new.name] = _success(made, version, described)
        else:
            results[new.name] = _refusal(new.name, outcome)
    return CreateTopicsResponse(topics=list(results.values()))


def _too_many(request: CreateTopicsRequest, default: int) -> ApiError | None:
    """Return the error of a request that would create too many partitions in all.

    Return None if there are not too many.

    Args:
        request: the request.
        default: the number of partitions of a topic for which the request names none.
    """
    total = 0
    for topic in request.topics:
        if topic.assignments:
            total += len(topic.assignments)
        elif topic.num_partitions == _BROKER_DEFAULT:
            total += default
        else:
            total += max(0, topic.num_partitions)
    if total <= MAX_PARTITIONS_PER_BATCH:
        return None
    return ApiError(
        ErrorCode.POLICY_VIOLATION,
        f"Excessively large number of partitions per request: {total}; at most"
        f" {MAX_PARTITIONS_PER_BATCH} are created by one.",
    )


def _permitted(
    wanted: list[NewTopic],
    registry: TopicRegistry,
    permit: Callable[[int], None],
    results: dict[str, CreatableTopicResult],
) -> list[NewTopic]:
    """Return the topics for which the sender's quota is enough, and charge it.

    A topic that cannot be created is returned too, and not charged.

    Args:
        wanted: the topics to create.
        registry: says which of them can be created.
        permit: charges the quota; raises ApiError if it is not enough.
        results: gets the refusals of the other topics, by name.
    """
    permitted = []
    outcomes = registry.create_topics(wanted, validate_only=True)
    for new, outcome in zip(wanted, outcomes, strict=True):
        try:
            if not isinstance(outcome, ApiError):
                permit(new.num_partitions)
            permitted.append(new)
        except ApiError as error:
            results[new.name] = _refusal(new.name, error)
    return permitted


def _new_topic(topic: CreatableTopic, broker: Broker) -> NewTopic:
    overrides: dict[str, str] = {}
    for config in topic.configs:
        if config.value is None:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Null value not supported for topic configs: {config.name}",
            )
        overrides[config.name] = config.value
    if topic.assignments:
        count = _assigned(topic, broker.node_id)
    else:
        _check_replication(topic.replication_factor)
        count = topic.num_partitions
        if count == _BROKER_DEFAULT:
            count = broker.num_partitions
    return NewTopic(topic.name, count, overrides)


def _check_replication(factor: int) -> None:
    """Check that a topic wants one replica, or the default (-1).

    Raises:
        ApiError: INVALID_REPLICATION_FACTOR, with Kafka's texts.
    """
    if factor in (1, _BROKER_DEFAULT):
        return
    if factor < 1:
        raise ApiError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    raise ApiError(
        ErrorCode.INVALID_REPLICATION_FACTOR,
        f"Unable to replicate the partition {factor} time(s): The target replication"
        f" factor of {factor} cannot be reached because only 1 broker(s) are"
        " registered.",
    )


def _assigned(topic: CreatableTopic, node_id: int) -> int:
    """Check a topic's manual assignment of replicas; return its number of partitions.

    Raises:
        ApiError: INVALID_REQUEST if the request also has numbers of partitions or
            replicas. INVALID_REPLICA_ASSIGNMENT if the assignment is wrong.
    """
    if (topic.num_partitions, topic.replication_factor) != (-1, -1):
        raise invalid_request(
            "Both numPartitions or replicationFactor and replicasAssignments were set."
            " Both cannot be used at the same time.",
        )
    check_assignments(topic.assignments, node_id)
    indexes = sorted(each.partition_index for each in topic.assignments)
    if indexes != list(range(len(indexes))):
        raise ApiError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "partitions should be a consecutive 0-based integer sequence",
        )
    return len(indexes)


def check_assignments(
    assignments: Sequence[CreatableReplicaAssignment], node_id: int
) -> None:
    """Check that each partition has exactly one replica, which is on this broker.

    Raises:
        ApiError: INVALID_REPLICA_ASSIGNMENT: a partition has another assignment.
    """
    for each in assignments:
        if each.broker_ids != [node_id]:
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment {each.broker_ids} is not possible:"
                f" broker {node_id} is the only one, and holds each partition once.",
            )


def _refusal(name: str, error: ApiError) -> CreatableTopicResult:
    return CreatableTopicResult(
        name=name, error_code=error.error_code, error_message=str(error), configs=None
    )


def _success(topic: Topic, version: int, described: _Described) -> CreatableTopicResult:
    result = CreatableTopicResult(
        name=topic.name,
        topic_id=topic.topic_id,
        error_code=ErrorCode.NONE,
        error_message=None,
        num_partitions=len(topic.partitions),
        replication_factor=1,
    )
    if version >= _CONFIGS_SINCE:
        result.configs = described.configs(topic.config)
    return result


class _Described:
    """Describes the configs of new topics, with the sources that DescribeConfigs names.

    A request may create 10,000 topics, each of which has some 40 configs. So they share
    the entries of configs that they do not set.

    Args:
        defaults: the configs of topics that set none.
        sources: the broker's configs.
    """

    def __init__(self, defaults: LogConfig, sources: BrokerConfigs) -> None:
        self._defaults = defaults
        self._sources = sources
        self._entries: dict[str, CreatableTopicConfigs] = {}

    def configs(self, config: LogConfig) -> list[CreatableTopicConfigs]:
        """Return the entries of one topic."""
        if not self._entries:
            self._entries = {
                key.name: _entry(
                    key, self._defaults, self._sources.source_of_topic_key(key.name)
                )
                for key in LOG_CONFIG_DEF
            }
        own = {
            name: _entry(LOG_CONFIG_DEF.key(name), config, ConfigSource.TOPIC_CONFIG)
            for name in config.overrides
        }
        return list((self._entries | own).values())


def _entry(
    key: ConfigKey, config: LogConfig, source: ConfigSource
) -> CreatableTopicConfigs:
    return CreatableTopicConfigs(
        name=key.name,
        value=key.format(config.value(key.name)),
        read_only=False,
        config_source=source,
        is_sensitive=False,
    )
