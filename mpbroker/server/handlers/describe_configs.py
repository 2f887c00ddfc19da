"""DescribeConfigs: describe configs of resources, and where each value was set.

Source: Kafka protocol guide, "DescribeConfigs"; KIP-226 for synonyms, KIP-569 for
types and documentation; ConfigHelper.describeConfigs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from mpbroker.base.config_def import ConfigDef, ConfigKey, UpdateMode
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.metadata.topic_names import check_topic_name
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from mpbroker.server.answer_budget import AnswerBudget, about_bytes
from mpbroker.server.configs.broker_loggers import broker_loggers
from mpbroker.server.configs.client_metrics_config import (
    CLIENT_METRICS_CONFIG_DEF,
    check_subscription_name,
)
from mpbroker.server.configs.config_entries import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    Synonym,
    canonical,
)
from mpbroker.server.configs.config_resources import (
    broker_configs,
    check_broker_name,
    unsupported_resource,
)
from mpbroker.server.configs.group_config_def import (
    GROUP_CONFIG_DEF,
    check_group_name,
    group_default,
)
from mpbroker.server.handler_context import Broker, HandlerContext

# The names of the keys that a request wants of a resource; none of them: all keys.
_Wanted: TypeAlias = frozenset[str]
# Entries, and about how many bytes they have when they are encoded.
_Sized: TypeAlias = tuple[list[DescribeConfigsResourceResult], int]
# Resources of these kinds that set no configs have the same entries.
_ALIKE: Final = (TOPIC_RESOURCE, GROUP_RESOURCE, CLIENT_METRICS_RESOURCE)


def handle_describe_configs(
    request: DescribeConfigsRequest, context: HandlerContext
) -> DescribeConfigsResponse:
    """Answer each resource of the request with its configs, or with an error."""
    describer = _Describer(request, context.broker)
    return DescribeConfigsResponse(
        results=[describer.describe(resource) for resource in request.resources]
    )


class _Describer:
    """Describes the resources of one request."""

    def __init__(self, request: DescribeConfigsRequest, broker: Broker) -> None:
        self._request = request
        self._loggers = broker_loggers(broker.node_id, broker.levels)
        self._registry = broker.registry
        self._node_id = broker.node_id
        self._broker = broker_configs(broker)
        self._budget = AnswerBudget()
        # A request may name one resource 100,000 times, or as many groups that do not
        # exist. So entries that are the same are made once, and so is their size.
        self._chosen: dict[tuple[int, _Wanted], Sequence[ConfigKey]] = {}
        self._made: dict[tuple[int, str, _Wanted], _Sized] = {}

    def describe(self, resource: DescribeConfigsResource) -> DescribeConfigsResult:
        result = DescribeConfigsResult(
            resource_type=resource.resource_type, resource_name=resource.resource_name
        )
        try:
            self._budget.check()
            # A name of a few bytes asks for some 10 KB, also if no group has it.
            result.configs, size = self._sized(resource)
            self._budget.spend_bytes(size + about_bytes(resource.resource_name))
        except ApiError as error:
            result.configs = []
            result.error_code = error.error_code
            result.error_message = str(error)
        else:
            result.error_message = None
        return result

    def _sized(self, resource: DescribeConfigsResource) -> _Sized:
        """Return a resource's entries, and about how many bytes they have encoded."""
        kind, name = resource.resource_type, resource.resource_name
        wanted = frozenset(resource.configuration_keys or ())
        self._check_name(kind, name)
        sets_none = kind in _ALIKE and not self._registry.image.config(kind, name)
        same = kind, "" if sets_none else name, wanted
        made = self._made.get(same)
        if made is None:
            entries = list(self._entries(kind, name, wanted))
            made = self._made[same] = entries, about_bytes(entries)
        return made

    def _check_name(self, kind: int, name: str) -> None:
        """Raise ApiError if there can be no resource of this kind and name."""
        if kind == TOPIC_RESOURCE:
            check_topic_name(name)
            if self._registry.topic(name) is None:
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"The topic '{name}' does not exist.",
                )
        elif kind == GROUP_RESOURCE:
            check_group_name(name)
        elif kind == CLIENT_METRICS_RESOURCE:
            check_subscription_name(name)

    def _entries(
        self, kind: int, name: str, wanted: _Wanted
    ) -> Iterable[DescribeConfigsResourceResult]:
        if kind == TOPIC_RESOURCE:
            return self._topic_entries(name, wanted)
        if kind == GROUP_RESOURCE:
            return self._group_entries(name, wanted)
        if kind == CLIENT_METRICS_RESOURCE:
            return self._subscription_entries(name, wanted)
        if kind == BROKER_LOGGER_RESOURCE and self._loggers:
            return self._loggers.describe(name, wanted)
        if kind != BROKER_RESOURCE:
            raise unsupported_resource(kind)
        if not name:
            return self._broker_default_entries(wanted)
        check_broker_name(name, self._node_id)
        return self._broker_entries(wanted)

    def _topic_entries(
        self, name: str, wanted: _Wanted
    ) -> Iterator[DescribeConfigsResourceResult]:
        topic = self._registry.topic(name)
        assert topic is not None, "its name was checked"
        config = topic.config
        for key in self._choose(TOPIC_RESOURCE, LOG_CONFIG_DEF, wanted):
            text = key.format(config.value(key.name))
            synonyms = self._broker.synonyms_of_topic_key(key.name)
            if key.name in config.overrides and text is not None:
                own = Synonym(key.name, text, ConfigSource.TOPIC_CONFIG)
                synonyms.insert(0, own)
            yield self._entry(key, text, synonyms, read_only=False)

    def _group_entries(
        self, group_id: str, wanted: _Wanted
    ) -> Iterator[DescribeConfigsResourceResult]:
        """Yield the configs of a group, which need not exist."""
        overrides = self._registry.group_overrides(group_id)
        for key in self._choose(GROUP_RESOURCE, GROUP_CONFIG_DEF, wanted):
            default = group_default(key.name, self._broker)
            synonyms = [Synonym(key.name, default, ConfigSource.DEFAULT_CONFIG)]
            text = overrides.get(key.name)
            if text is not None:
                own = Synonym(key.name, text, ConfigSource.GROUP_CONFIG)
                synonyms.insert(0, own)
            value = canonical(key, synonyms[0].text)
            yield self._entry(key, value, synonyms, read_only=False)

    def _subscription_entries(
        self, name: str, wanted: _Wanted
    ) -> Iterator[DescribeConfigsResourceResult]:
        """Yield the configs of a metrics subscription, which need not exist."""
        overrides = self._registry.image.config(CLIENT_METRICS_RESOURCE, name)
        for key in self._choose(
            CLIENT_METRICS_RESOURCE, CLIENT_METRICS_CONFIG_DEF, wanted
        ):
            default = key.format(key.default) or ""
            synonyms = [Synonym(key.name, default, ConfigSource.DEFAULT_CONFIG)]
            text = overrides.get(key.name)
            if text is not None:
                source = ConfigSource.DYNAMIC_CLIENT_METRICS_CONFIG
                synonyms.insert(0, Synonym(key.name, text, source))
            value = canonical(key, synonyms[0].text)
            yield self._entry(key, value, synonyms, read_only=False)

    def _broker_entries(
        self, wanted: _Wanted
    ) -> Iterator[DescribeConfigsResourceResult]:
        for key in self._choose(BROKER_RESOURCE, self._broker.definition, wanted):
            synonyms = self._broker.synonyms(key.name)
            own = [each.text for each in synonyms if each.name == key.name]
            text = canonical(key, own[0]) if own else None
            read_only = key.update_mode is UpdateMode.READ_ONLY
            yield self._entry(key, text, synonyms, read_only=read_only)
        for name in self._broker.of_listeners():
            prefixed = self._broker.definition.of_listener(name)
            if prefixed is None or (wanted and name not in wanted):
                continue
            key = prefixed[1]
            synonyms = self._broker.synonyms_of_listener(name, key)
            text = canonical(key, synonyms[0].text)
            read_only = key.update_mode is UpdateMode.READ_ONLY
            yield self._entry(key, text, synonyms, read_only=read_only, name=name)

    def _broker_default_entries(
        self, wanted: _Wanted
    ) -> Iterator[DescribeConfigsResourceResult]:
        """Yield those dynamic configs that are set for all brokers."""
        for name, text in self._broker.dynamic_default.items():
            prefixed = self._broker.definition.of_listener(name)
            key = prefixed[1] if prefixed else self._broker.definition.get(name)
            if key is None or (wanted and name not in wanted):
                continue
            source = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
            synonyms = [Synonym(name, text, source)]
            value = canonical(key, text)
            yield self._entry(key, value, synonyms, read_only=False, name=name)

    def _choose(
        self, kind: int, definition: ConfigDef, wanted: _Wanted
    ) -> Sequence[ConfigKey]:
        """Return the keys that a request wants. As in Kafka, no names mean all keys."""
        chosen = self._chosen.get((kind, wanted))
        if chosen is None:
            chosen = [key for key in definition if not wanted or key.name in wanted]
            self._chosen[kind, wanted] = chosen
        return chosen

    def _entry(
        self,
        key: ConfigKey,
        text: str | None,
        synonyms: list[Synonym],
        *,
        read_only: bool,
        name: str | None = None,
    ) -> DescribeConfigsResourceResult:
        hidden = key.is_sensitive
        request = self._request
        source = synonyms[0].source if synonyms else ConfigSource.DEFAULT_CONFIG
        return DescribeConfigsResourceResult(
            name=name or key.name,
            value=None if hidden or text is None else key.shown(text),
            read_only=read_only,
            config_source=source,
            is_sensitive=hidden,
            synonyms=[
                DescribeConfigsSynonym(
                    name=synonym.name,
                    value=None if hidden else key.shown(synonym.text),
                    source=synonym.source,
                )
                for synonym in (synonyms if request.include_synonyms else ())
            ],
            config_type=key.type.value,
            documentation=key.documentation if request.include_documentation else None,
        )
