"""The settings of a share consumer, with Kafka's names and defaults.

Source: the "Consumer Configs" of the Apache Kafka documentation, and KIP-932 for those
that a share consumer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
    one_of,
    utf8,
)
from mpbroker.client.settings import COMMON_KEYS, ClientSettings, parse_settings, pick
from mpbroker.client.share.share_member import ShareGroupSettings
from mpbroker.client.share.share_session import (
    BATCH_OPTIMIZED,
    RECORD_LIMIT,
    ShareFetchSettings,
)

# fmt: off
SHARE_CONSUMER_CONFIG: Final = ConfigDef("share consumer setting", (
    *COMMON_KEYS,
    ConfigKey("group.id", ConfigType.STRING, None,
        "Name of the share group.", validator=utf8()),
    ConfigKey("client.rack", ConfigType.STRING, "",
        "Where the client is, for an assignor that asks for it.", validator=utf8()),
    ConfigKey("share.acknowledgement.mode", ConfigType.STRING, "implicit",
        "implicit: the next poll() accepts the records of the one before. explicit:"
        " acknowledge() says of each record what becomes of it.",
        validator=one_of("implicit", "explicit")),
    ConfigKey("share.acquire.mode", ConfigType.STRING, "batch_optimized",
        "batch_optimized: whole batches, also if they have more records than"
        " max.poll.records. record_limit: never more records.",
        validator=one_of("batch_optimized", "record_limit")),
    ConfigKey("max.poll.interval.ms", ConfigType.INT, 300_000,
        "A member that does not call poll() for so long leaves the group.",
        validator=at_least(1)),
    ConfigKey("max.poll.records", ConfigType.INT, 500,
        "Records to ask a broker for at a time.", validator=at_least(1)),
    ConfigKey("fetch.max.wait.ms", ConfigType.INT, 500,
        "Longest time for which a broker waits for records.", validator=at_least(0)),
    ConfigKey("fetch.min.bytes", ConfigType.INT, 1,
        "A broker waits until it has so many bytes.", validator=at_least(0)),
    ConfigKey("fetch.max.bytes", ConfigType.INT, 52_428_800,
        "Most bytes of an answer.", validator=at_least(0)),
))
# fmt: on


class ShareConsumerSettings(NamedTuple):
    """A share consumer's settings as plain values; see `SHARE_CONSUMER_CONFIG`."""

    client: ClientSettings
    group: ShareGroupSettings
    fetch: ShareFetchSettings
    is_explicit: bool

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ShareConsumerSettings:
        """Check the settings that a user gave, and return all settings.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        values = parse_settings(SHARE_CONSUMER_CONFIG, given)
        if not values["group.id"]:
            raise ConfigError("group.id is not set; give the name of a share group")
        strict = values["share.acquire.mode"] == "record_limit"
        return cls(
            client=ClientSettings.of(values, max_in_flight=5).named_as_consumer(values),
            group=pick(ShareGroupSettings, values),
            fetch=pick(
                ShareFetchSettings,
                values,
                share_acquire_mode=RECORD_LIMIT if strict else BATCH_OPTIMIZED,
            ),
            is_explicit=values["share.acknowledgement.mode"] == "explicit",
        )
