"""Extension points of a broker: what a class of your own derives from, and is given.

- `Authorizer` decides what clients may do. The setting authorizer.class.name names a
  class, as python:MODULE:CLASS.
- `ClientTelemetryReceiver` takes the metrics that clients push (KIP-714). The setting
  client.telemetry.receiver.class.name names a class likewise.

docs/security.md and docs/operations.md have an example of each. What extends a client,
such as Partitioner and Serializer, is in mpbroker itself.
"""

from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.otlp_metrics import read_metrics
from mpbroker.server.authorization.authorizer import CLUSTER, Authorizer, Resource
from mpbroker.server.request_context import RequestContext
from mpbroker.server.telemetry.client_telemetry_receiver import (
    ClientTelemetryContext,
    ClientTelemetryPayload,
    ClientTelemetryReceiver,
)

__all__ = [
    "CLUSTER",
    "AclBinding",
    "AclFilter",
    "AclOperation",
    "AclPermissionType",
    "ApiError",
    "Authorizer",
    "ClientTelemetryContext",
    "ClientTelemetryPayload",
    "ClientTelemetryReceiver",
    "ErrorCode",
    "PatternType",
    "RequestContext",
    "Resource",
    "ResourceType",
    "read_metrics",
]
