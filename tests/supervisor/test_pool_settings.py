"""Whose word on the pools' sizes counts, and what is written down of it."""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.supervisor.pool_settings import PoolSettings
from mpbroker.supervisor.pools import PoolSizes

HANDLERS, PROCESSORS = "num.io.threads", "num.network.threads"


class FakeRegistry:
    """The dynamic configs of broker 1 and, as "", of all."""

    def __init__(self):
        self.configs = {"1": {}, "": {}}

    def catch_up(self):
        return False

    def broker_overrides(self, name):
        return self.configs[name]


@pytest.fixture
def registry():
    return FakeRegistry()


def settings_of(registry, **more):
    config = BrokerConfig.load(
        {HANDLERS: "2", PROCESSORS: "1", **more}, None, {}, cores=2
    )
    names = [each.listener_name for each in config.endpoints]
    return PoolSettings(config, registry, names)


def write(settings, registry, *, has_worked=True):
    texts = dict(settings.to_write())
    if has_worked:
        registry.configs["1"].update(texts)
    settings.written(has_worked=has_worked)
    return texts


def test_without_dynamic_configs_it_is_as_the_broker_was_started(registry):
    assert settings_of(registry).sizes() == PoolSizes(2, (1,))


def test_what_is_asked_for_counts_at_once_and_is_written_down(registry):
    settings = settings_of(registry)
    settings.ask(5, 3)
    assert settings.sizes() == PoolSizes(5, (3,))
    assert write(settings, registry) == {HANDLERS: "5", PROCESSORS: "3"}
    assert settings.sizes() == PoolSizes(5, (3,))
    assert not settings.to_write()


def test_what_is_asked_for_while_another_is_written_is_written_after_it(registry):
    settings = settings_of(registry)
    settings.ask(5, None)
    texts = dict(settings.to_write())
    settings.ask(6, None)
    assert not settings.to_write()
    registry.configs["1"].update(texts)
    assert settings.sizes().handlers == 6
    settings.written(has_worked=True)
    assert settings.sizes().handlers == 6
    assert write(settings, registry) == {HANDLERS: "6"}


def test_whoever_sets_another_size_later_wins(registry):
    settings = settings_of(registry)
    settings.ask(5, None)
    write(settings, registry)
    registry.configs["1"][HANDLERS] = "4"
    assert settings.sizes().handlers == 4
    del registry.configs["1"][HANDLERS]
    registry.configs[""][HANDLERS] = "3"
    assert settings.sizes().handlers == 3


def test_what_cannot_be_written_counts_until_somebody_sets_another(registry):
    settings = settings_of(registry)
    settings.ask(5, None)
    write(settings, registry, has_worked=False)
    assert settings.sizes().handlers == 5
    assert not settings.to_write()  # not again and again
    registry.configs["1"][HANDLERS] = "4"
    assert settings.sizes().handlers == 4


def test_what_the_log_says_already_is_not_written_again(registry):
    registry.configs["1"][HANDLERS] = "5"
    settings = settings_of(registry)
    settings.ask(5, None)
    assert not settings.to_write()


def test_a_size_that_is_not_possible_any_more_stops_nothing(registry, caplog):
    registry.configs[""].update({HANDLERS: "900", PROCESSORS: "4"})
    settings = settings_of(registry)
    assert settings.sizes() == settings.sizes() == PoolSizes(2, (4,))
    assert caplog.text.count("num.io.threads=900: not accepted") == 1


@pytest.mark.parametrize(("handlers", "processors"), [(0, None), (None, 65), (120, 1)])
def test_what_is_out_of_range_is_refused_whole(registry, handlers, processors):
    settings = settings_of(registry)
    with pytest.raises(ConfigError, match=r"not accepted; it must be .* between 1 and"):
        settings.ask(handlers, processors)
    assert settings.sizes() == PoolSizes(2, (1,))


LISTENERS = {
    "listeners": "A://127.0.0.1:0,B://127.0.0.1:0,C://127.0.0.1:0",
    "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT,C:PLAINTEXT",
    "inter.broker.listener.name": "A",
}


def test_a_listener_with_a_number_of_its_own_keeps_it(registry):
    own = {"listener.name.b.num.network.threads": "30"}
    settings = settings_of(registry, **LISTENERS, **own)
    settings.ask(None, 17)
    assert settings.sizes() == PoolSizes(2, (17, 30, 17))
    with pytest.raises(ConfigError, match="between 1 and 17, since 3 listeners share"):
        settings.ask(None, 18)


def test_where_every_listener_has_its_own_there_is_nobody_to_resize(registry):
    own = {f"listener.name.{name}.num.network.threads": "2" for name in "abc"}
    settings = settings_of(registry, **LISTENERS, **own)
    with pytest.raises(ConfigError, match="no listener follows it"):
        settings.ask(None, 3)


def test_listeners_own_numbers_must_leave_one_for_each_of_the_others(registry):
    own = {f"listener.name.{name}.num.network.threads": "32" for name in "ab"}
    with pytest.raises(ConfigError, match="64 processors for 2 of 3 listeners"):
        settings_of(registry, **LISTENERS, **own)
