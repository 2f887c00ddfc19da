"""PoolSettings: the wanted numbers of handlers and processors.

They are the values of num.io.threads and num.network.threads: the dynamic values of
this broker, else those of all brokers, else the values that the broker was started
with. ``ctl resize`` sets the dynamic values of this broker. So a resize still counts
after the next start, and DescribeConfigs shows it. It takes effect at once, even if it
cannot be written to the metadata log.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpbroker.base.config_def import ConfigError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.config import BrokerConfig
from mpbroker.config.broker_config import HANDLERS_KEY, PROCESSORS_KEY
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.ipc.layout import MAX_PROCESSORS
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.supervisor.pools import PoolSizes

_LOG = get_logger(__name__)


class _Asked(NamedTuple):
    """A pool size from ``ctl resize`` that is not in the metadata log yet."""

    text: str
    instead_of: str | None  # the dynamic value of this broker when it was asked for
    given_up: bool = False  # whether it could not be written


class PoolSettings:
    """Returns the pool sizes that the metadata log and ``ctl resize`` ask for.

    Args:
        registry: the supervisor's view of the metadata log.
        listeners: the names of the listeners, by number.
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
        """Return how many handlers and processors are wanted now.

        New records of the metadata log are read first. If there are none, that costs
        one comparison.
        """
        self._registry.catch_up()
        own = self._own_processors()
        followers = len(self._listeners) - len(own)
        each = self._value(PROCESSORS_KEY)
        if followers:
            # Listeners' own numbers, set later, may leave fewer for the others.
            left = MAX_PROCESSORS - sum(own.values())
            each = max(1, min(each, left // followers))
        return PoolSizes(
            self._value(HANDLERS_KEY),
            tuple(own.get(listener, each) for listener in self._listeners),
        )

    def _own_processors(self) -> dict[str, int]:
        """Return the numbers of processors that listeners set themselves, by name.

        A listener sets it by listener.name.NAME.num.network.threads.
        """
        configs = self._listener_configs
        return {
            listener: number
            for listener in self._listeners
            if isinstance(
                number := configs.own_of_listener(listener, PROCESSORS_KEY), int
            )
        }

    def ask(self, handlers: int | None, processors: int | None) -> None:
        """Change the wanted numbers of handlers and processors, as ``ctl resize`` does.

        Args:
            handlers: the number of handlers; None: unchanged.
            processors: the number of processors of each listener without a number of
                its own; None: unchanged.

        Raises:
            ConfigError: a size is outside its limits, or every listener has a number of
                its own; nothing is changed.
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
                f" listener.name.NAME.{PROCESSORS_KEY}: change that instead"
            )
        for name, text in wanted.items():
            self._asked[name] = _Asked(text, self._dynamic(name))

    def to_write(self) -> dict[str, str]:
        """Return the dynamic configs that must be written after a ``ctl resize``.

        The result is empty while others are being written, so that the last size asked
        for is written last.
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
        """Note whether the sizes set by ``ctl resize`` are in the metadata log now."""
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
                "a resize could not be written to the metadata log, and counts until"
                " the next start only: %s; set it again with `mpbroker config set`",
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
                # It was accepted under other limits, and must not stop the broker now.
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
        """Forget a size of ``ctl resize`` if a config has set another one since."""
        asked = self._asked.get(name)
        if asked is None:
            return
        ours = {asked.instead_of, self._being_written.get(name, asked.instead_of)}
        if self._dynamic(name) not in ours:
            del self._asked[name]
