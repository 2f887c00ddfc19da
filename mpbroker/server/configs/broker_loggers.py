"""Describe and change the levels of a broker's loggers: the resource BROKER_LOGGER.

A level is valid for all processes of the broker, until the broker is started again.
Requests use the names of Kafka's levels; the loggers are those of Python's logging.

Source: KIP-412; Kafka's RuntimeLoggerManager, Log4jController and ConfigHelper, which
also have the texts of the errors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import mpbroker
from mpbroker.base.logger import DEFAULT_LEVEL, LEVELS, ROOT, get_logger
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_configs import DescribeConfigsResourceResult
from mpbroker.protocol.messages.incremental_alter_configs import AlterableConfig
from mpbroker.server.errors import invalid_request

_LOG = get_logger(__name__)

_NAMES: Final = {number: name for name, number in LEVELS.items()}
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_REFUSED_OPERATIONS: Final = {_APPEND: "APPEND", _SUBTRACT: "SUBTRACT"}

# The packages that a broker's processes import.
_PACKAGES: Final = (
    "broker",
    "config",
    "console",
    "coordinator",
    "exporter",
    "ipc",
    "metadata",
    "network",
    "server",
    "storage",
    "supervisor",
)
# The text of a source file that has a logger.
_MARK: Final = b" = get_logger(__name__)"


class Levels(Protocol):
    """Reads and changes the levels in shared memory, by name of the logger."""

    def read(self) -> Mapping[str, int]: ...

    def change(self, put: Mapping[str, int | None]) -> None: ...


def broker_loggers(node_id: int, levels: Levels | None) -> BrokerLoggers | None:
    """Return an object for the loggers of a broker; None if ``levels`` is None."""
    return None if levels is None else BrokerLoggers(node_id, levels, logger_names)


class BrokerLoggers:
    """Describes and changes the levels of one broker's loggers.

    Args:
        node_id: the broker's id, by which requests name the resource.
        levels: the levels that all processes use.
        names: returns the names of all loggers, including the root.
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
        """Return the effective levels of the wanted loggers.

        Args:
            resource_name: the broker's id.
            wanted: names of loggers; empty: all loggers.

        Raises:
            ApiError: INVALID_REQUEST: the resource is not this broker.
        """
        if not resource_name:
            raise invalid_request("Broker id must not be empty")
        number = _number("Broker id", resource_name)
        if number != self._node_id:
            raise invalid_request(
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
        """Set or remove levels. Without a level, a logger uses that of its parent.

        All operations are executed, or none.

        Args:
            resource_name: the broker's id.
            operations: SET or DELETE, for each logger.
            validate_only: check the operations, and change nothing.

        Raises:
            ApiError: INVALID_REQUEST or INVALID_CONFIG; nothing was changed.
        """
        number = _number("Node id", resource_name)
        if number != self._node_id:
            raise invalid_request(
                f"Unexpected node id. Expected {self._node_id}, but received"
                f" {resource_name}"
            )
        put = {each.name: self._level(each) for each in operations}
        if validate_only:
            return
        self._levels.change(put)
        for each in operations:
            # A warning, as in Kafka: the level of this line is rarely switched off, so
            # it explains why other lines are missing.
            if each.config_operation == _SET:
                _LOG.warning("Updated the log level of %s to %s", each.name, each.value)
            else:
                _LOG.warning("Unset the log level of %s", each.name)

    def _level(self, operation: AlterableConfig) -> int | None:
        name = operation.name
        refused = _REFUSED_OPERATIONS.get(operation.config_operation)
        if refused is not None:
            raise invalid_request(
                f"{refused} operation is not allowed for the BROKER_LOGGER resource"
            )
        if name not in self._names():
            raise ApiError(
                ErrorCode.INVALID_CONFIG, f"Logger {_shown(name)} does not exist!"
            )
        if operation.config_operation == _DELETE:
            if name == ROOT:
                raise invalid_request(
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
    """Return the level of a logger.

    If it has none, return that of its nearest parent that has one, or the default.
    """
    while name:
        if name in levels:
            return levels[name]
        name = name.rpartition(".")[0]
    return levels.get(ROOT, DEFAULT_LEVEL)


def _number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise invalid_request(
            f"{what} must be an integer, but it is: {_shown(text)}"
        ) from None


def _shown(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."


# -- the names of loggers -----------------------------------------------------------


@functools.cache
def logger_names() -> frozenset[str]:
    """Return the names of all loggers, of the packages above them, and of the root.

    A process knows the loggers of the modules that it has imported, and no process
    imports all modules. So this function searches the installed source files. The first
    call reads some 2 MB.
    """
    top = os.path.dirname(mpbroker.__file__)
    names = {ROOT}
    for package in _PACKAGES:
        for directory, _, files in os.walk(os.path.join(top, package)):
            for file in files:
                path = os.path.join(directory, file)
                if file.endswith(".py") and _has_logger(path):
                    module = os.path.relpath(path, os.path.dirname(top))[: -len(".py")]
                    names |= _with_parents(module.replace(os.sep, "."))
    return frozenset(names)


def _has_logger(path: str) -> bool:
    with open(path, "rb") as file:
        return _MARK in file.read()


def _with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
