"""Settings as plain values: each field is of the type that it says."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from mpbroker import (
    AdminClient,
    AsyncConsumer,
    Consumer,
    Producer,
    ShareConsumer,
)
from mpbroker.base.config_def import ConfigError
from mpbroker.client.consumer.consumer_config import ConsumerSettings
from mpbroker.client.settings import ADMIN_CONFIG, ClientSettings, parse_settings, pick
from mpbroker.client.share.share_consumer_config import ShareConsumerSettings
from mpbroker.producer.config import ProducerSettings

GIVEN = {"bootstrap.servers": "localhost:9092"}
CONSUMER = ConsumerSettings.parse({**GIVEN, "group.id": "g"})
CLIENT = ClientSettings.of(parse_settings(ADMIN_CONFIG, GIVEN), max_in_flight=5)


@pytest.mark.parametrize(
    "settings",
    [CONSUMER, CONSUMER.group, CONSUMER.fetch, ProducerSettings.parse(GIVEN), CLIENT],
    ids=lambda settings: type(settings).__name__,
)
def test_every_field_has_a_value_of_its_type(settings):
    for name, hint in get_type_hints(type(settings)).items():
        if isinstance(hint, type):
            assert type(getattr(settings, name)) is hint, name


def test_a_default_of_a_part_is_kafkas_where_the_setting_has_one():
    assert ClientSettings(CLIENT.bootstrap, "", security=CLIENT.security) == CLIENT
    assert ConsumerSettings.parse(GIVEN).group is None


def test_socket_buffers_are_left_to_the_kernel():
    assert (CLIENT.send_buffer_bytes, CLIENT.receive_buffer_bytes) == (-1, -1)


def test_a_field_takes_the_value_of_the_key_that_is_spelled_like_it():
    settings = ConsumerSettings.parse(
        {
            **GIVEN,
            "fetch.max.wait.ms": 7,
            "max.partition.fetch.bytes": 8,
            "isolation.level": "read_committed",
            "metadata.max.age.ms": 9,
            "socket.connection.setup.timeout.ms": 10,
        }
    )
    assert settings.fetch.fetch_max_wait_ms == 7
    assert settings.fetch.max_partition_fetch_bytes == 8
    assert settings.fetch.isolation_level == 1
    assert settings.client.metadata_max_age_ms == 9
    assert settings.client.socket_connection_setup_timeout_ms == 10


def test_a_field_that_no_setting_is_spelled_like_must_be_given():
    with pytest.raises(TypeError, match="bootstrap"):
        pick(ClientSettings, parse_settings(ADMIN_CONFIG, GIVEN))


def test_consumers_without_client_id_have_kafkas_names():
    def name(kind, **more):
        return kind.parse({"bootstrap.servers": "h:1", **more}).client.client_id

    grouped = {"group.id": "g"}
    assert name(ConsumerSettings, **grouped, **{"client.id": "me"}) == "me"
    instance = {"group.instance.id": "i-7"}
    assert name(ConsumerSettings, **grouped, **instance) == "consumer-g-i-7"
    first = name(ConsumerSettings, **grouped)
    second = name(ShareConsumerSettings, **grouped)
    number = int(first.removeprefix("consumer-g-"))
    assert second == f"consumer-g-{number + 1}"
    assert name(ConsumerSettings) == f"consumer-{number + 2}"


@pytest.mark.parametrize(
    "client", [Consumer, Producer, AdminClient, ShareConsumer, AsyncConsumer]
)
def test_a_topics_name_in_the_place_of_the_settings_is_told_to_be_one(client):
    with pytest.raises(
        ConfigError, match=r"'events' is given as the settings.*mapping"
    ):
        client("events")
