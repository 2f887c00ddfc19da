"""What the authorizer has allowed, as tables for the short cut in C.

Only permissions, of senders that have asked for just that: whoever finds none is asked
about the usual way. They hold for one version of the authorizer's rules. ACLs change
with the metadata log alone, of whose news a handler knows before it takes any short
cut; an authorizer of one's own is asked for its version before each request.

The twin is native/server/verdicts.c, which reads them; request_context.py says what
tells senders apart. Without the compiled core there is no short cut, and none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.protocol.acl import AclOperation
from mpbroker.server.authorization.authorizer import StandardAuthorizer

if TYPE_CHECKING:
    from mpbroker.native import _core
    from mpbroker.server.authorization.authorization import Access, Authorization

# Clients are many, and name what they like.
_MAX_VERDICTS: Final = 50_000


class Verdicts:
    """The tables of one handler process.

    Attributes:
        change_any_time: rules may change though the metadata log does not.

    Args:
        compiled: holds them.
        authorization: says what may be put there.
    """

    def __init__(
        self, compiled: _core.HandlerEnd, authorization: Authorization
    ) -> None:
        self._authorization = authorization
        self._compiled = compiled
        self._version: int | None = None
        self._count = 0
        # Not a class derived from it, which may have rules from elsewhere.
        self.change_any_time = type(authorization.authorizer) is not StandardAuthorizer
        compiled.has_authorizer = True

    def be_current(self) -> None:
        """Forget what was allowed under rules that have changed."""
        version = self._authorization.version
        if version != self._version:
            self._forget()
            self._version = version

    def allow(
        self,
        access: Access,
        operation: AclOperation,
        name: str,
        topic_id: bytes | None = None,
    ) -> None:
        """Let the next requests of a sender pass that do this, as one just did.

        Args:
            access: which has said yes to it.
            operation: READ or WRITE.
            name: the topic's.
            topic_id: what requests may call it, too.
        """
        self.be_current()
        if self._version is None or access.version != self._version:
            return  # no answer may be kept, or this one is of earlier rules
        compiled = self._compiled
        if operation is AclOperation.WRITE:
            by_sender, anybody = compiled.writers, compiled.anybody_writes
        else:
            by_sender, anybody = compiled.readers, compiled.anybody_reads
        names: set[str | bytes] = {name}
        if topic_id is not None:
            names.add(topic_id)
        key = access.sender.key
        if names <= anybody or (key is not None and names <= by_sender.get(key, set())):
            return
        if self._count >= _MAX_VERDICTS:
            self._forget()
        self._count += 1
        if self._authorization.everybody_may(operation, name):
            anybody |= names
        elif key is not None:
            by_sender.setdefault(key, set()).update(names)

    def _forget(self) -> None:
        compiled = self._compiled
        compiled.writers.clear()
        compiled.readers.clear()
        compiled.anybody_writes.clear()
        compiled.anybody_reads.clear()
        self._count = 0
