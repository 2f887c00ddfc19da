"""Levels of loggers, by kafka-python's admin: librdkafka's knows no such resource."""

from __future__ import annotations

from kafka.admin import (
    AlterConfigOp,
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
)

from tests.support.broker import Broker

NAME = "mpbroker.config"


def test_kafka_python_sets_and_shows_them(own_broker: Broker) -> None:
    admin = KafkaAdminClient(bootstrap_servers=own_broker.bootstrap)

    def change(operation: AlterConfigOp, value: str | None) -> None:
        configs = {NAME: (operation, value)}
        admin.alter_configs([ConfigResource("BROKER_LOGGER", "1", configs)])

    def level() -> str:
        wanted = ConfigResource(ConfigResourceType.BROKER_LOGGER, "1")
        found = admin.describe_configs([wanted], config_filter="all")
        return str(found["broker_logger"]["1"][NAME]["value"])

    try:
        assert level() == "INFO"
        change(AlterConfigOp.SET, "FATAL")
        assert level() == "FATAL"
        change(AlterConfigOp.DELETE, None)
        assert level() == "INFO"
    finally:
        admin.close()
