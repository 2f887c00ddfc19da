"""The broker's keys for clients' metrics: KIP-714's, and ours for who receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.base.config_def import ConfigType, at_least
from mpbroker.config.broker_key import BrokerKey

if TYPE_CHECKING:
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryReceiver,
    )

RECEIVER_KEY: Final = "client.telemetry.receiver.class.name"
ENTRY_POINT_GROUP: Final = "mpbroker.client_telemetry_receivers"

TELEMETRY_KEYS: Final = [
    BrokerKey(
        "telemetry.max.bytes",
        ConfigType.INT,
        1024 * 1024,
        "Largest push of a client's metrics that is taken, compressed and inflated.",
        validator=at_least(1),
    ),
    BrokerKey(
        "client.telemetry.log.path",
        ConfigType.STRING,
        None,
        "File to which the metrics that clients push are appended, a line of JSON a"
        " push. Who shall push what is said by subscriptions, as with Kafka: mpbroker"
        " config set --client-metrics, or kafka-client-metrics.sh. If neither this nor"
        " client.telemetry.receiver.class.name is set, clients are not asked.",
    ),
    BrokerKey(
        "client.telemetry.log.max.bytes",
        ConfigType.LONG,
        100 * 1024 * 1024,
        "A file of client.telemetry.log.path that is so large is renamed to that name"
        " and .1, and a new one begun: what clients push takes twice this at most, and"
        " a push of each process that executes requests.",
        validator=at_least(1),
    ),
    BrokerKey(
        RECEIVER_KEY,
        ConfigType.STRING,
        "",
        "Class that gets the metrics that clients push: python:MODULE:CLASS, or the"
        f" name of an entry point in the group {ENTRY_POINT_GROUP}. It is a subclass"
        " of mpbroker.extensions.ClientTelemetryReceiver.",
    ),
]


def load_receiver_class(name: str) -> type[ClientTelemetryReceiver]:
    """Import the class of a receiver.

    Raises:
        ConfigError: there is none of that name, or it is no receiver.
    """
    from mpbroker.config.plug_ins import load_class
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryReceiver,
    )

    found: type[ClientTelemetryReceiver] = load_class(
        RECEIVER_KEY, name, ClientTelemetryReceiver, ENTRY_POINT_GROUP
    )
    return found
