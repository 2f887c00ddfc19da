"""The APIs about ACLs: decode, ask the authorizer, encode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.intent import Intent, no_intent
from mpbroker.server.request import CLOSE, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access, Authorization


class AclApis:
    """The APIs about ACLs, of one handler process."""

    def __init__(
        self,
        authorization: Authorization | None,
        intent: Callable[[Request], Intent] = no_intent,
    ) -> None:
        """Args:
        intent: where a request notes what it is about to change.
        """
        self._authorization = authorization
        self._intent = intent

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes | Deferred]]:
        """Return what answers each API."""
        return {
            ApiKey.DESCRIBE_ACLS: self._describe_acls,
            ApiKey.CREATE_ACLS: self._create_acls,
            ApiKey.DELETE_ACLS: self._delete_acls,
        }

    def _access(self, request: Request) -> Access | Deferred | None:
        """Who asks whom; CLOSE: nobody is there any more; None: nobody to be asked."""
        if self._authorization is None:
            return None
        return self._authorization.access(request) or CLOSE

    def _describe_acls(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.describe_acls import DescribeAclsRequest
        from mpbroker.server.handlers.describe_acls import handle_describe_acls

        message = DescribeAclsRequest.decode(request.api_version, request.body)
        access = self._access(request)
        if isinstance(access, Deferred):
            return access
        return handle_describe_acls(message, access).encode(request.api_version)

    def _create_acls(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.create_acls import CreateAclsRequest
        from mpbroker.server.handlers.create_acls import handle_create_acls

        message = CreateAclsRequest.decode(request.api_version, request.body)
        access = self._access(request)
        if isinstance(access, Deferred):
            return access
        return handle_create_acls(message, access).encode(request.api_version)

    def _delete_acls(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.delete_acls import DeleteAclsRequest
        from mpbroker.server.handlers.delete_acls import handle_delete_acls

        message = DeleteAclsRequest.decode(request.api_version, request.body)
        access = self._access(request)
        if isinstance(access, Deferred):
            return access
        return handle_delete_acls(message, access, self._intent(request)).encode(
            request.api_version
        )
