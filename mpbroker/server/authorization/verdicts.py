"""Keep the authorizer's permissions in tables, which C code reads.

The C code executes plain requests without Python (a short cut).

The tables hold permissions only, and only those that a request needed before. A request
whose permission is not in the tables takes the usual way through Python. A permission
is valid for one version of the authorizer's rules. ACLs change only with the metadata
log, whose new records a handler reads before it takes any short cut. The version of an
authorizer from a plug-in is compared before each request.

native/server/verdicts.c reads the tables; request_context.py says what identifies a
sender. Without the compiled core there is no short cut, and these tables do not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.protocol.acl import AclOperation
from mpbroker.server.authorization.authorizer import StandardAuthorizer

if TYPE_CHECKING:
    from mpbroker.native import _core
    from mpbroker.server.authorization.authorization import Access, Authorization

# A bound of memory: clients may use any number of topics.
_MAX_VERDICTS: Final = 50_000


class Verdicts:
    """Fills the tables of permissions of one handler process.

    Two tables, for writing and for reading, map a sender's key (Sender.key) to a set of
    topic names and ids. Two sets hold the topics that any sender may write to or read.
    Answers that Python has given (server/repeated/) depend on permissions, too:
    their table is emptied with these.

    Attributes:
        change_any_time: whether the rules may change without a record in the metadata
            log, so that the version must be compared before each request.

    Args:
        compiled: the object of the C core that holds the tables.
        authorization: asks the authorizer.
    """

    def __init__(
        self, compiled: _core.HandlerEnd, authorization: Authorization
    ) -> None:
        self._authorization = authorization
        self._compiled = compiled
        self._version: int | None = None
        self._count = 0
        # A subclass may have rules that are not in the metadata log.
        self.change_any_time = type(authorization.authorizer) is not StandardAuthorizer
        compiled.has_authorizer = True

    def be_current(self) -> None:
        """Empty the tables if the version of the authorizer's rules has changed."""
        version = self._authorization.version
        if version != self._version:
            self._forget()
            self._version = version

    def are_of(self, version: int | None) -> bool:
        """Return whether the tables are of this version of the authorizer's rules.

        If not, a decision was made by earlier rules, or it must not be kept.
        """
        self.be_current()
        return version is not None and version == self._version

    def allow(
        self,
        access: Access,
        operation: AclOperation,
        name: str,
        topic_id: bytes | None = None,
    ) -> None:
        """Add a permission that was just granted to a sender.

        Do nothing if the authorizer's decisions must not be kept, or if its rules have
        changed since the permission was granted.

        Args:
            access: the sender's access; it has allowed the operation.
            operation: READ or WRITE.
            name: the topic's name.
            topic_id: the topic's id of 16 bytes, if requests may use it.
        """
        if not self.are_of(access.version):
            return
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
        compiled.repeatable.clear()
        self._count = 0
