"""Settings of the network that are good alone, and not where or with what they are."""

from __future__ import annotations

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig

OF_LISTENER = "listener.name.plaintext."
PER_IP = "max.connections.per.ip"


def load(**texts: str) -> BrokerConfig:
    return BrokerConfig.load(texts, None, {}, cores=2)


@pytest.mark.parametrize("key", ["max.connections", "max.connection.creation.rate"])
def test_a_listener_that_may_have_no_connections_is_none(key):
    with pytest.raises(ConfigError) as caught:
        load(**{OF_LISTENER + key: "0"})
    assert str(caught.value).startswith(f"{OF_LISTENER}{key}=0: not accepted")
    assert "1 or more" in str(caught.value)
    assert load(**{OF_LISTENER + key: "1"}).for_listener("PLAINTEXT", key) == 1
    assert load(**{key: "0"}).resolved(key).value == 0  # inter-broker may stay


def test_nobody_may_connect_only_with_exceptions():
    with pytest.raises(
        ConfigError, match=r"per\.ip=0.* max\.connections\.per\.ip\.over"
    ):
        load(**{PER_IP: "0"})
    config = load(**{PER_IP: "0", f"{PER_IP}.overrides": "127.0.0.1:5"})
    assert config.connection_overrides() == {"127.0.0.1": 5}


def test_the_listener_between_brokers_is_named_or_found_by_its_protocol():
    both = {
        "inter.broker.listener.name": "PLAINTEXT",
        "security.inter.broker.protocol": "PLAINTEXT",
    }
    with pytest.raises(ConfigError, match=r"Only one of inter\.broker\.listener"):
        load(**both)
    for name, text in both.items():
        assert load(**{name: text}).resolved(name).value == "PLAINTEXT"
