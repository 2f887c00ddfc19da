"""CreateAcls: add access control entries.

Source: Kafka protocol guide, "CreateAcls".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT8, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message


class AclCreation(Struct):
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)
    resource_pattern_type: int = field(INT8, "1+", default=3)
    principal: str = field(STRING)
    host: str = field(STRING)
    operation: int = field(INT8)
    permission_type: int = field(INT8)


class CreateAclsRequest(
    Message, api_key=ApiKey.CREATE_ACLS, versions=(1, 3), flexible_from=2
):
    creations: list[AclCreation] = array(AclCreation)


class AclCreationResult(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")


class CreateAclsResponse(
    Message, api_key=ApiKey.CREATE_ACLS, versions=(1, 3), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    results: list[AclCreationResult] = array(AclCreationResult)
