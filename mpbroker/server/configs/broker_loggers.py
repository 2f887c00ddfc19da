"""BROKER_LOGGER: the levels of a broker's loggers, as configs of a resource.

They hold for all processes of the broker, and until it is started again. What they are
is asked and told with the names of Kafka's levels; the loggers are Python's.

Source: KIP-412; Kafka's RuntimeLoggerManager, Log4jController and ConfigHelper, whose
sentences these are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from mpbroker.base.logger import DEFAULT_LEVEL, LEVELS, ROOT, get_logger
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_configs import DescribeConfigsResourceResult
from mpbroker.protocol.messages.incremental_alter_configs import AlterableConfig
from mpbroker.server.configs.logger_names import logger_names

_LOG = get_logger(__name__)

_NAMES: Final = {number: name for name, number in LEVELS.items()}
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_REFUSED_OPERATIONS: Final = {_APPEND: "APPEND", _SUBTRACT: "SUBTRACT"}


class Levels(Protocol):
    """Where the levels are that all processes obey."""

    def read(self) -> Mapping[str, int]: ...

    def change(self, put: Mapping[str, int | None]) -> None: ...


def broker_loggers(node_id: int, levels: Levels | None) -> BrokerLoggers | None:
    """Return the loggers of a broker; None: they cannot be asked for."""
    return None if levels is None else BrokerLoggers(node_id, levels, logger_names)


class BrokerLoggers:
    """The loggers of one broker.

    Args:
        names: of all loggers there are, the root's among them.
    """

    def __init__(
        self, node_id: int, levels: Levels, names: Callable[[], Collection[str]]
    ) -> None:
        self._node_id = node_id
        self._levels = levels
        self._names = names

    def describe(
        self, resource_name: str, wanted: Collection[str]
    ) -> list[DescribeConfigsResourceResult]:
        """Return the level in effect of each logger that is wanted; of none: of all.

        Raises:
            ApiError: INVALID_REQUEST, it is not this broker's resource.
        """
        if not resource_name:
            raise _invalid("Broker id must not be empty")
        number = _number("Broker id", resource_name)
        if number != self._node_id:
            raise _invalid(
                f"Unexpected broker id, expected {self._node_id} but received"
                f" {resource_name}"
            )
        levels = self._levels.read()
        return [
            DescribeConfigsResourceResult(
                name=name,
                value=_NAMES[_effective(name, levels)],
                read_only=False,
                config_source=ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG,
                is_sensitive=False,
                synonyms=[],
                documentation=None,
            )
            for name in sorted(self._names())
            if not wanted or name in wanted
        ]

    def alter(
        self,
        resource_name: str,
        operations: Sequence[AlterableConfig],
        *,
        validate_only: bool,
    ) -> None:
        """Set levels, or go back to those of the loggers above: all or none.

        Raises:
            ApiError: INVALID_REQUEST or INVALID_CONFIG; nothing was changed.
        """
        number = _number("Node id", resource_name)
        if number != self._node_id:
            raise _invalid(
                f"Unexpected node id. Expected {self._node_id}, but received"
                f" {resource_name}"
            )
        put = {each.name: self._level(each) for each in operations}
        if validate_only:
            return
        self._levels.change(put)
        for each in operations:
            # As in Kafka: who wonders about missing lines should find this one.
            if each.config_operation == _SET:
                _LOG.warning("Updated the log level of %s to %s", each.name, each.value)
            else:
                _LOG.warning("Unset the log level of %s", each.name)

    def _level(self, operation: AlterableConfig) -> int | None:
        name = operation.name
        refused = _REFUSED_OPERATIONS.get(operation.config_operation)
        if refused is not None:
            raise _invalid(
                f"{refused} operation is not allowed for the BROKER_LOGGER resource"
            )
        if name not in self._names():
            raise ApiError(
                ErrorCode.INVALID_CONFIG, f"Logger {_shown(name)} does not exist!"
            )
        if operation.config_operation == _DELETE:
            if name == ROOT:
                raise _invalid(
                    f"Removing the log level of the {ROOT} logger is not allowed"
                )
            return None
        level = LEVELS.get(operation.value or "")
        if level is None:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Cannot set the log level of {name} to"
                f" {_shown(operation.value or '')} as it is not a supported log level."
                f" Valid log levels are {', '.join(sorted(LEVELS))}",
            )
        return level


def _effective(name: str, levels: Mapping[str, int]) -> int:
    """The level of the nearest logger above that has one, or of the root."""
    while name:
        if name in levels:
            return levels[name]
        name = name.rpartition(".")[0]
    return levels.get(ROOT, DEFAULT_LEVEL)


def _number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _invalid(
            f"{what} must be an integer, but it is: {_shown(text)}"
        ) from None


def _shown(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)
