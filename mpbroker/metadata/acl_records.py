"""AclImage: the access control entries of the metadata log, and changes of them.

Each entry has an id of 16 random bytes. The record that removes an entry has this id.

Source: Apache Kafka, AccessControlEntryRecord.json, RemoveAccessControlEntryRecord.json
and AclControlManager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from mpbroker.metadata.meta_properties import random_uuid, uuid_of_text, uuid_to_text
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)

# The number of the latest removing requests that are known. A request is executed again
# within seconds after its process was killed.
_REQUESTS_KNOWN: Final = 16

ENTRY_RECORD: Final = "AccessControlEntryRecord"
REMOVAL_RECORD: Final = "RemoveAccessControlEntryRecord"

AclRecord = dict[str, Any]


def access_control_entry_record(acl_id: bytes, acl: AclBinding) -> AclRecord:
    """Make the record that adds an entry, with its id of 16 bytes."""
    return {
        "type": ENTRY_RECORD,
        "id": uuid_to_text(acl_id),
        "resourceType": int(acl.resource_type),
        "resourceName": acl.resource_name,
        "patternType": int(acl.pattern_type),
        "principal": acl.principal,
        "host": acl.host,
        "operation": int(acl.operation),
        "permissionType": int(acl.permission_type),
    }


def remove_access_control_entry_record(
    acl_id: bytes, request_id: bytes | None = None
) -> AclRecord:
    """Make the record that removes an entry.

    Args:
        acl_id: the entry's id.
        request_id: 16 bytes that identify the request which removes the entry; see
            delete_acls(). Kafka's record has no such field.
    """
    record: AclRecord = {"type": REMOVAL_RECORD, "id": uuid_to_text(acl_id)}
    if request_id is not None:
        record["request"] = uuid_to_text(request_id)
    return record


class AclImage:
    """The access control entries, after the records that were replayed so far.

    Attributes:
        version: the number of records replayed; it changes when the entries change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._by_id: dict[bytes, AclBinding] = {}
        self._ids: dict[AclBinding, bytes] = {}
        self._removed: dict[str, list[AclBinding]] = {}  # by the latest requests

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[AclBinding]:
        """Iterate over all access control entries, oldest first."""
        return iter(self._by_id.values())

    def __contains__(self, acl: AclBinding) -> bool:
        return acl in self._ids

    def id_of(self, acl: AclBinding) -> bytes:
        """Return an entry's id; raises KeyError if there is no such entry."""
        return self._ids[acl]

    def removed_by(self, request_id: bytes) -> list[AclBinding]:
        """Return the ACL entries that a request, one of the latest 16, has removed."""
        return self._removed.get(uuid_to_text(request_id), [])

    def replay_entry(self, record: AclRecord) -> None:
        """Apply an AccessControlEntryRecord, which adds an entry.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or malformed, or there
                is such an id or entry already.
        """
        acl_id = uuid_of_text(record["id"])
        acl = AclBinding(
            ResourceType(record["resourceType"]),
            str(record["resourceName"]),
            PatternType(record["patternType"]),
            str(record["principal"]),
            str(record["host"]),
            AclOperation(record["operation"]),
            AclPermissionType(record["permissionType"]),
        )
        if acl_id in self._by_id or acl in self._ids:
            raise ValueError("the entry exists already")
        self._by_id[acl_id] = acl
        self._ids[acl] = acl_id
        self.version += 1

    def replay_removal(self, record: AclRecord) -> None:
        """Apply a RemoveAccessControlEntryRecord; raises as replay_entry()."""
        acl = self._by_id.pop(uuid_of_text(record["id"]))
        del self._ids[acl]
        self.version += 1
        request = record.get("request")
        if request is not None:
            self._removed.setdefault(str(request), []).append(acl)
            if len(self._removed) > _REQUESTS_KNOWN:
                del self._removed[next(iter(self._removed))]

    def records(self) -> list[AclRecord]:
        """Return records that, replayed alone, give all of these entries."""
        return [
            access_control_entry_record(acl_id, acl)
            for acl_id, acl in self._by_id.items()
        ]


class HasAcls(Protocol):
    """An object with the broker's ACL entries, such as a MetadataImage."""

    @property
    def acls(self) -> AclImage:
        """The broker's access control entries."""
        ...


class Metadata(Protocol):
    """The broker's metadata: its present state, and a way to commit changes of it.

    A TopicRegistry, one process's view of the metadata log, is such an object.
    """

    @property
    def image(self) -> HasAcls: ...

    def change(self, decide: Callable[[HasAcls], Sequence[AclRecord]], /) -> None: ...


def create_acls(metadata: Metadata, acls: Iterable[AclBinding]) -> None:
    """Add access control entries with one write to disk; skip existing ones.

    Raises:
        ApiError: KAFKA_STORAGE_ERROR; nothing was added.
    """
    wanted = dict.fromkeys(acls)
    metadata.change(
        lambda image: [
            access_control_entry_record(random_uuid(), acl)
            for acl in wanted
            if acl not in image.acls
        ]
    )


def delete_acls(
    metadata: Metadata, filters: Sequence[AclFilter], request_id: bytes | None = None
) -> list[list[AclBinding]]:
    """Remove, with one write to disk, the ACL entries that match any of the filters.

    Args:
        metadata: the broker's metadata, such as a TopicRegistry.
        filters: the filters.
        request_id: 16 bytes that identify the request. If a process is killed after the
            write, the request is executed again: the second call with the same id
            removes nothing, and returns the entries that the first has removed.

    Returns:
        For each filter the entries that match it, oldest first.

    Raises:
        ApiError: KAFKA_STORAGE_ERROR; nothing was removed.
    """
    deleted: list[list[AclBinding]] = []

    def decide(image: HasAcls) -> list[AclRecord]:
        earlier = [] if request_id is None else image.acls.removed_by(request_id)
        there = earlier or image.acls
        deleted[:] = [[acl for acl in there if f.matches(acl)] for f in filters]
        if earlier:
            return []
        gone = {acl for acls in deleted for acl in acls}
        # In the order of the image, so that a second call returns the same order.
        return [
            remove_access_control_entry_record(image.acls.id_of(acl), request_id)
            for acl in image.acls
            if acl in gone
        ]

    metadata.change(decide)
    return deleted


class MetadataAcls:
    """The ACL entries in the metadata log: to iterate over, to add to and to remove."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def version(self) -> int:
        return self._metadata.image.acls.version

    def __iter__(self) -> Iterator[AclBinding]:
        return iter(self._metadata.image.acls)

    def create(self, acls: Iterable[AclBinding]) -> None:
        """Add access control entries, as create_acls() does."""
        create_acls(self._metadata, acls)

    def delete(
        self, filters: Sequence[AclFilter], request_id: bytes | None = None
    ) -> list[list[AclBinding]]:
        """Remove the entries that match the filters, as delete_acls() does."""
        return delete_acls(self._metadata, filters, request_id)
