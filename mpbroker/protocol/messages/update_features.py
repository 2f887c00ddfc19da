"""UpdateFeatures: change the levels of features.

Version 1 added the type of the change and the dry run; version 2 has no results of
single features.

Source: Kafka protocol guide, "UpdateFeatures".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class FeatureUpdateKey(Struct):
    feature: str = field(STRING)
    max_version_level: int = field(INT16)
    allow_downgrade: bool = field(BOOLEAN, "0")
    upgrade_type: int = field(INT8, "1+", default=1)


class UpdateFeaturesRequest(
    Message, api_key=ApiKey.UPDATE_FEATURES, versions=(0, 2), flexible_from=0
):
    timeout_ms: int = field(INT32, default=60000)
    feature_updates: list[FeatureUpdateKey] = array(FeatureUpdateKey)
    validate_only: bool = field(BOOLEAN, "1+")


class UpdatableFeatureResult(Struct):
    feature: str = field(STRING)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class UpdateFeaturesResponse(
    Message, api_key=ApiKey.UPDATE_FEATURES, versions=(0, 2), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    results: list[UpdatableFeatureResult] = array(
        UpdatableFeatureResult, "0-1", ignorable=True
    )
