"""Build the receiver of clients' metrics, if one is configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpbroker.base.config_def import ConfigError
from mpbroker.broker.authorizer_setup import request_contexts
from mpbroker.config.plug_ins import RECEIVER_KEY, load_receiver_class
from mpbroker.server.telemetry.client_telemetry import ClientTelemetry
from mpbroker.server.telemetry.client_telemetry_receiver import Receivers, TelemetryLog

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryReceiver,
    )
    from mpbroker.supervisor.listen_sockets import Listener
    from mpbroker.supervisor.memory import BrokerMemory


def check_receiver(config: BrokerConfig) -> None:
    """Import the class of the clients' metrics receiver, and try the settings on it.

    Call it once, before the first fork: so the command reports an error.

    Raises:
        ConfigError: the class cannot be used.
    """
    _foreign_receiver(config)


def _foreign_receiver(config: BrokerConfig) -> ClientTelemetryReceiver:
    name = config.client_telemetry_receiver_class_name
    receiver = load_receiver_class(name)()
    try:
        receiver.configure(config.static_texts())
    except ValueError as error:
        raise ConfigError(f"{RECEIVER_KEY}={name}: {error}") from error
    return receiver


def client_telemetry(
    config: BrokerConfig,
    memory: BrokerMemory,
    listeners: Sequence[Listener],
    registry: TopicRegistry,
) -> ClientTelemetry:
    """Return the object that takes clients' metrics, for a configured receiver."""
    path = config.client_telemetry_log_path
    receivers: list[ClientTelemetryReceiver] = []
    if path:
        receivers.append(TelemetryLog(path, config.client_telemetry_log_max_bytes))
    if config.client_telemetry_receiver_class_name:
        receivers.append(_foreign_receiver(config))
    return ClientTelemetry(
        memory.control.words,
        registry,
        memory.client_instances,
        request_contexts(memory, listeners),
        Receivers(receivers),
        config.telemetry_max_bytes,
    )
