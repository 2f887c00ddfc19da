"""Claim a place in a store (a URL) for one broker, so that no other writes there.

Each start of a broker runs this as a separate process. It also fetches the manifests
(lists of remote segments) of partitions whose directories were lost:

    python -m mpbroker.storage.remote.store_owner URL CLUSTER_ID NODE_ID HOME LOG_DIR...
"""

from __future__ import annotations

import base64
import os
import re
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mpbroker.base.directories import sync_directory
from mpbroker.base.storage_errors import (
    RemoteObjectMissingError,
    RemoteStorageError,
    RemoteUnreachableError,
    StorageError,
    UnconditionalStoreError,
)
from mpbroker.metadata.metadata_log import read_metadata_image
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.leader_epochs import FILE_NAME as LEADER_EPOCHS
from mpbroker.storage.files.log_files import (
    REMOTE_MANIFEST_FILE,
    SNAPSHOT_SUFFIX,
    segment_file,
    write_file,
)
from mpbroker.storage.remote.remote_manifest import (
    RemoteManifest,
    RemoteSegment,
    SegmentIndexes,
    indexes_key,
    manifest_key,
    partition_prefix,
)
from mpbroker.storage.remote.remote_plan import KnownPartition, read_known

OWNER_KEY: Final = "owner"
_OWNER_FORM: Final = re.compile(
    rb"cluster\.id=\S+\nnode\.id=-?[0-9]+\n(token=\S+\n)?", re.ASCII
)
TOKEN_FILE: Final = "remote-store-token"

if TYPE_CHECKING:
    from mpbroker.storage.remote.object_store import ObjectStore

# Behind it comes a random part: several nodes of a cluster may try at the same time.
_PROBE_PREFIX: Final = "probe-"


class NotOwnerError(RemoteStorageError):
    """Another broker keeps its segments at this URL."""


class StoreOwner(NamedTuple):
    """The broker that may write below a URL of the remote store.

    Attributes:
        cluster_id: the id of the broker's cluster.
        node_id: the broker's node.id.
        token: a text that tells a restored broker from the one before it; "": the
            broker was not restored.
    """

    cluster_id: str
    node_id: int
    token: str = ""

    def encode(self) -> bytes:
        """Encode this as the object `owner`, which says whose the URL is."""
        text = f"cluster.id={self.cluster_id}\nnode.id={self.node_id}\n"
        return (text + (f"token={self.token}\n" if self.token else "")).encode()


def read_token(home: str) -> str:
    """Return the token by which a restored broker may take over the store.

    A restore has left it in the first log directory.

    "": the broker was not restored.
    """
    try:
        with open(f"{home}/{TOKEN_FILE}", encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def read_owner(store: ObjectStore) -> str:
    """Return the content of the object `owner`, one line: who may write at this URL.

    Raises:
        RemoteStorageError: it cannot be read.
    """
    return _said(store.get(OWNER_KEY))


def _said(owner: bytes) -> str:
    return " ".join(owner.decode("utf-8", "replace").split())


def _is_owner(content: bytes) -> bool:
    """Return whether some bytes have the form of the object `owner`."""
    return _OWNER_FORM.fullmatch(content) is not None


def require_owner(store: ObjectStore, owner: StoreOwner) -> None:
    """Check that a place in the store still belongs to a broker.

    If the place has no owner, the broker claims it: the store was away at the start, or
    has lost the object `owner`.

    Raises:
        NotOwnerError: a restore has taken the place over, or it belongs to another
            broker.
        RemoteStorageError: the store cannot be read.
    """
    try:
        found = store.get(OWNER_KEY)
    except RemoteObjectMissingError:
        claim(store, owner)
        return
    if found == owner.encode():
        return
    if not _is_owner(found) or store.get(OWNER_KEY) != found:
        raise RemoteStorageError(
            f"{store.url} gives other bytes for {OWNER_KEY} than were written"
        )
    raise NotOwnerError(
        f"{store.url} belongs to another broker by now ({_said(found)}):"
        " nothing is copied or removed any more"
    )


def claim(store: ObjectStore, broker: StoreOwner) -> None:
    """Make a broker the only one that may write at a URL, unless another one is.

    Raises:
        NotOwnerError: the place belongs to another broker.
        UnconditionalStoreError: two brokers could claim the place at the same time.
        RemoteStorageError: the store cannot be used; the text says why.
    """
    own = broker.encode()
    try:
        owner = store.get(OWNER_KEY)
    except RemoteObjectMissingError:
        store.create(OWNER_KEY, own)
        owner = store.get(OWNER_KEY)  # of the first broker, if two have tried
    if owner != own and not _is_owner(owner):
        raise RemoteStorageError(
            f"{store.url} gives other bytes for {OWNER_KEY} than were written"
        )
    if owner != own:
        raise NotOwnerError(
            f"{store.url} belongs to another broker ({_said(owner)}): name another"
            " prefix"
        )
    # Some servers accept the condition "only if absent" and ignore it. Then this write
    # succeeds; it does no harm, since it writes the same bytes.
    if store.create(OWNER_KEY, own):
        raise UnconditionalStoreError(store.url)


def check_rights(store: ObjectStore) -> None:
    """Write, read and delete an object, to learn of missing rights at the start.

    Raises:
        RemoteStorageError: one of these failed; the text says which.
    """
    content = b"mpbroker"
    key = f"{_PROBE_PREFIX}{uuid.uuid4().hex}"
    store.put(key, content)
    if store.get_range(key, 2, 3) != content[2:5]:
        raise RemoteStorageError(f"{store.url} gives other bytes than it was given")
    store.delete([key])


def main(arguments: list[str]) -> int:
    """Check and claim a place in a store; return the exit code.

    An error is one line on stderr. The exit code is EX_TEMPFAIL if the store cannot be
    reached, and 1 after other errors.

    Args:
        arguments: the URL, the cluster id, the node id, the first log directory, and
            all log directories if lost partitions are to be restored.
    """
    url, cluster_id, node_id, home, *directories = arguments
    try:
        from mpbroker.storage.remote.object_store import ObjectStore
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is missing: pip install 'mpbroker-server[tiered]'",
            file=sys.stderr,
        )
        return 1
    try:
        store = ObjectStore(url, retry_s=10)
        claim(store, StoreOwner(cluster_id, int(node_id), read_token(home)))
        check_rights(store)
        restore_lost(store, directories)
    except RemoteUnreachableError as error:
        print(error, file=sys.stderr)
        return os.EX_TEMPFAIL
    except (StorageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def lost_partitions(directories: Sequence[str]) -> list[KnownPartition]:
    """Return the partitions that may have objects in the store, but no directory here.

    Partitions of deleted topics are left out: their objects are removed later.

    Args:
        directories: the directories of log.dirs; the first has the list of partitions.
            None: some of them are not there, so nothing is known to be lost.

    Raises:
        ManifestError: the list is damaged.
        CorruptLogError: the metadata log is damaged.
        OSError: the list or the metadata log cannot be read.
    """
    lost = [
        known
        for known in sorted(read_known(directories[0]) if directories else ())
        if not any(
            os.path.isdir(f"{each}/{known.topic}-{known.partition}")
            for each in directories
        )
    ]
    topics = read_metadata_image(directories[0]).topics if lost else {}
    return [
        known
        for known in lost
        if known.topic in topics and topics[known.topic].topic_id == known.topic_id
    ]


def restore_lost(store: ObjectStore, directories: Sequence[str]) -> None:
    """Make the directories of lost partitions, with their lists of remote segments.

    A log goes on behind its last segment in the store, with the producers' state and
    the leader epochs as of that segment's end. Segments that were not copied are lost.

    Raises:
        StorageError: the store cannot be read, or a manifest or the metadata log is
            damaged.
        OSError: a directory cannot be made.
    """
    for known in lost_partitions(directories):
        key = manifest_key(partition_prefix(known.topic_id, known.partition))
        try:
            content = store.get(key)
        except RemoteObjectMissingError:
            continue  # nothing was copied, or the topic was deleted
        make_directory(store, known, content, directories[-1])
        name = f"{known.topic}-{known.partition}"
        print(f"{name}: restored from {store.url}", file=sys.stdout)


def make_directory(
    store: ObjectStore, known: KnownPartition, content: bytes, log_directory: str
) -> None:
    """Make a partition's directory, with the manifest: its list of remote segments.

    Args:
        store: the store.
        known: the partition.
        content: the bytes of the partition's manifest.
        log_directory: the log directory in which to make it.

    Raises:
        StorageError: the store cannot be read, or the manifest is damaged.
        OSError: the directory cannot be made.
    """
    prefix = partition_prefix(known.topic_id, known.partition)
    copied = RemoteManifest.decode(content, prefix).copied()
    name = f"{known.topic}-{known.partition}"
    text = base64.urlsafe_b64encode(known.topic_id).rstrip(b"=")
    # The directory is complete before it gets its name: if this process is killed
    # before that, the next start makes it.
    made = f"{log_directory}/{name}.restored"
    os.makedirs(made, 0o750, exist_ok=True)
    write_file(f"{made}/{REMOTE_MANIFEST_FILE}", content)
    write_file(f"{made}/partition.metadata", b"version: 0\ntopic_id: " + text + b"\n")
    if copied:
        _restore_state(store, prefix, copied[-1], made)
    os.rename(made, f"{log_directory}/{name}")
    sync_directory(log_directory)


def _restore_state(
    store: ObjectStore, prefix: str, last: RemoteSegment, directory: str
) -> None:
    """Write the producers' state and leader epochs as of the last segment's end.

    Args:
        store: the store.
        prefix: the prefix of the partition's keys in the store.
        last: the partition's last segment in the store.
        directory: the directory to write to.
    """
    content = store.get(indexes_key(prefix, last), last.indexes_size)
    if crc32c(content) != last.indexes_crc:
        raise RemoteStorageError(
            f"{indexes_key(prefix, last)} has other bytes than were written"
        )
    indexes = SegmentIndexes.decode(content)
    if indexes.leader_epochs:
        write_file(f"{directory}/{LEADER_EPOCHS}", indexes.leader_epochs)
    snapshot = indexes.files.get(SNAPSHOT_SUFFIX)
    if snapshot is not None:
        write_file(segment_file(directory, last.next_base, SNAPSHOT_SUFFIX), snapshot)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
