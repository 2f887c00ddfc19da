"""ApiVersions: the APIs and versions that the broker serves; a client's first request.

If the broker does not know the request's version, the response has version 0, which
all clients can read.

Source: Kafka protocol guide, "ApiVersions"; KIP-511 for client software and features.
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    INT64,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class ApiVersionsRequest(
    Message, api_key=ApiKey.API_VERSIONS, versions=(0, 4), flexible_from=3
):
    client_software_name: str = field(STRING, "3+", ignorable=True)
    client_software_version: str = field(STRING, "3+", ignorable=True)


class ApiVersion(Struct):
    api_key: int = field(INT16)
    min_version: int = field(INT16)
    max_version: int = field(INT16)


class SupportedFeatureKey(Struct):
    name: str = field(STRING)
    min_version: int = field(INT16)
    max_version: int = field(INT16)


class FinalizedFeatureKey(Struct):
    name: str = field(STRING)
    max_version_level: int = field(INT16)
    min_version_level: int = field(INT16)


class ApiVersionsResponse(
    Message, api_key=ApiKey.API_VERSIONS, versions=(0, 4), flexible_from=3
):
    error_code: int = field(INT16)
    api_keys: list[ApiVersion] = array(ApiVersion)
    throttle_time_ms: int = field(INT32, "1+", ignorable=True)
    supported_features: list[SupportedFeatureKey] = array(
        SupportedFeatureKey, "3+", tag=0, ignorable=True
    )
    finalized_features_epoch: int = field(
        INT64, "3+", default=-1, tag=1, ignorable=True
    )
    finalized_features: list[FinalizedFeatureKey] = array(
        FinalizedFeatureKey, "3+", tag=2, ignorable=True
    )
    zk_migration_ready: bool = field(BOOLEAN, "3+", tag=3, ignorable=True)
