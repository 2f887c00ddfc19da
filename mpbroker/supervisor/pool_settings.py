"""What the pools' sizes follow from: Kafka's two dynamic configs.

num.io.threads and num.network.threads of this broker, else of all brokers, else as it
was started. A resize through ``ctl`` sets them for this broker, so that it holds after
the next start too, and is told by DescribeConfigs; it is in effect at once, even if it
cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.config import BrokerConfig
from mpbroker.config.broker_config import HANDLERS_KEY, PROCESSORS_KEY
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.ipc.layout import MAX_PROCESSORS
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.supervisor.pools import PoolSizes

_LOG = get_logger(__name__)


class _Asked(NamedTuple):
    """A size that was asked for and is not in the metadata log yet."""

    text: str
    instead_of: str | None  # what the log said then
    given_up: bool = False  # it cannot be written


class PoolSettings:
    """The sizes that are wanted, as the metadata log and the operator have it.

    Args:
        registry: the supervisor's own view of the metadata log.
        listeners: the listeners' names, by number.
    """

    def __init__(
        self, config: BrokerConfig, registry: TopicRegistry, listeners: Sequence[str]
    ) -> None:
        self._config = config
        self._registry = registry
        self._listeners = listeners
        self._listener_configs = DynamicConfig(config, registry.broker_overrides)
        self._asked: dict[str, _Asked] = {}
        self._being_written: dict[str, str] = {}
        self._refused: set[tuple[str, str]] = set()

    def sizes(self) -> PoolSizes:
        """Return the sizes wanted now. It catches up with the log: one comparison."""
        self._registry.catch_up()
        own = self._own_processors()
        followers = len(self._listeners) - len(own)
        each = self._value(PROCESSORS_KEY)
        if followers:
            # What was set since may leave fewer: the more particular setting counts.
            left = MAX_PROCESSORS - sum(own.values())
            each = max(1, min(each, left // followers))
        return PoolSizes(
            self._value(HANDLERS_KEY),
            tuple(own.get(listener, each) for listener in self._listeners),
        )

    def _own_processors(self) -> dict[str, int]:
        """The processors of listeners that do not follow num.network.threads."""
        configs = self._listener_configs
        return {
            listener: number
            for listener in self._listeners
            if isinstance(
                number := configs.own_of_listener(listener, PROCESSORS_KEY), int
            )
        }

    def ask(self, handlers: int | None, processors: int | None) -> None:
        """Want other sizes from now on.

        Args:
            processors: of each listener that has no number of its own.

        Raises:
            ConfigError: out of range, or nobody would follow; nothing is changed.
        """
        wanted = {
            name: str(number)
            for name, number in ((HANDLERS_KEY, handlers), (PROCESSORS_KEY, processors))
            if number is not None
        }
        for name, text in wanted.items():
            self._config.definition.key(name).parse(text)
        self._registry.catch_up()
        if processors is not None and len(self._own_processors()) == len(
            self._listeners
        ):
            raise ConfigError(
                f"{PROCESSORS_KEY}={processors}: no listener follows it; each has a"
                f" listener.name.NAME.{PROCESSORS_KEY}, which is to be changed instead"
            )
        for name, text in wanted.items():
            self._asked[name] = _Asked(text, self._dynamic(name))

    def to_write(self) -> dict[str, str]:
        """Return the dynamic configs of this broker that are to be written now.

        Nothing while others are being written: what was asked last is written last.
        """
        if self._being_written:
            return {}
        self._being_written = {
            name: asked.text
            for name, asked in self._asked.items()
            if asked.text != asked.instead_of and not asked.given_up
        }
        return self._being_written

    def written(self, *, has_worked: bool) -> None:
        """What to_write() returned is in the log, or cannot be written."""
        written, self._being_written = self._being_written, {}
        self._registry.catch_up()
        for name, asked in list(self._asked.items()):
            if self._dynamic(name) == asked.text:
                del self._asked[name]
            elif name in written:
                failed = not has_worked and asked.text == written[name]
                self._asked[name] = _Asked(asked.text, self._dynamic(name), failed)
        if not has_worked:
            _LOG.error(
                "a resize could not be written down, and is in effect only until the"
                " next start: %s; set it with IncrementalAlterConfigs",
                ", ".join(f"{name}={text}" for name, text in written.items()),
            )

    def _value(self, name: str) -> int:
        key = self._config.definition.key(name)
        self._forget_overruled(name)
        asked = self._asked.get(name)
        for text in (
            asked.text if asked is not None else None,
            self._dynamic(name),
            self._registry.broker_overrides("").get(name),
        ):
            if text is None:
                continue
            try:
                value = key.parse(text)
            except ConfigError as error:
                # Set when the limits were others: no reason not to start.
                if (name, text) not in self._refused:
                    self._refused.add((name, text))
                    _LOG.warning("a dynamic config has no effect: %s", error)
                continue
            assert isinstance(value, int)
            return value
        static = self._config.resolved(name).value
        assert isinstance(static, int)
        return static

    def _dynamic(self, name: str) -> str | None:
        return self._registry.broker_overrides(str(self._config.node_id)).get(name)

    def _forget_overruled(self, name: str) -> None:
        """If somebody has set another size since one was asked for, that one counts."""
        asked = self._asked.get(name)
        if asked is None:
            return
        ours = {asked.instead_of, self._being_written.get(name, asked.instead_of)}
        if self._dynamic(name) not in ours:
            del self._asked[name]
