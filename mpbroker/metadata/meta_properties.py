"""Read and write meta.properties: the identity of a data directory.

The file is in every directory of `log.dirs`, as Kafka writes it (version 1):

    node.id=1
    version=1
    cluster.id=5L6g3nShT-eMCtK--X86sw
    directory.id=...

Source: KIP-631 and KIP-858.
"""

from __future__ import annotations

import errno
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import LogDirectoryError

FILE_NAME: Final = "meta.properties"
_VERSION: Final = "1"
# In the place of the version while `mpbroker restore` fills a directory. Neither a
# broker of ours nor an Apache Kafka starts there.
UNFINISHED: Final = "unfinished-restore"
_FEW: Final = 128


class MetaProperties(NamedTuple):
    """The identity of one data directory: its cluster, its node and its own id."""

    cluster_id: str
    node_id: int
    directory_id: str


def random_uuid() -> bytes:
    """Return a new id of 16 random bytes.

    It is neither of the ids that Kafka reserves (0 and 1), and its text does not begin
    with "-".

    Source: org.apache.kafka.common.Uuid.randomUuid.
    """
    while True:
        # Command lines would take a text that begins with "-" for an option.
        uuid = os.urandom(16)
        if int.from_bytes(uuid) > 1 and not uuid_to_text(uuid).startswith("-"):
            return uuid


# Records of partitions that follow each other name the same topic and directory.
@lru_cache(maxsize=_FEW)
def uuid_to_text(uuid: bytes) -> str:
    """Return Kafka's text form of a 16-byte id: 22 characters of URL-safe base64."""
    return urlsafe_b64encode(uuid)[:22].decode("ascii")


@lru_cache(maxsize=_FEW)
def uuid_of_text(text: str) -> bytes:
    """Return the 16-byte id of a text that uuid_to_text() has made.

    Raises:
        ValueError: the text is not 22 characters of URL-safe base64.
    """
    uuid = urlsafe_b64decode(text + "==")
    if len(uuid) != 16 or uuid_to_text(uuid) != text:
        raise ValueError(f"{text!r} is not the text of a 16-byte id")
    return uuid


def open_data_directories(log_dirs: Sequence[str], node_id: int) -> str:
    """Check that all directories belong to this broker; return the cluster id.

    New directories are created and get the cluster id of the others; if all are new,
    they get a random one.

    Args:
        log_dirs: the directories of ``log.dirs``.
        node_id: the setting node.id.

    Raises:
        LogDirectoryError: a directory belongs to another node or cluster, or cannot be
            used.
    """
    known = {path: read_meta_properties(path) for path in log_dirs}
    cluster_id = None
    for path, found in known.items():
        if found is None:
            continue
        if found.node_id != node_id:
            raise LogDirectoryError(
                f"log.dirs: {path} belongs to node.id={found.node_id}, but node.id is"
                f" {node_id}; set node.id={found.node_id} or use another directory"
            )
        if cluster_id is not None and found.cluster_id != cluster_id:
            raise LogDirectoryError(
                f"log.dirs: {path} belongs to cluster {found.cluster_id}, the others"
                f" to {cluster_id}; the directories of one broker belong together"
            )
        cluster_id = found.cluster_id
    cluster_id = cluster_id or uuid_to_text(random_uuid())
    for path, found in known.items():
        if found is None:
            directory_id = uuid_to_text(random_uuid())
            write_meta_properties(
                path, MetaProperties(cluster_id, node_id, directory_id)
            )
    return cluster_id


def read_meta_properties(directory: str) -> MetaProperties | None:
    """Return a directory's identity, or None if it has none yet.

    Raises:
        LogDirectoryError: the file is unreadable, incomplete, or of another version.
    """
    path = os.path.join(directory, FILE_NAME)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LogDirectoryError(f"log.dirs: cannot read {path}: {error}") from None
    values = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values[name.strip()] = value.strip()
    version = values.get("version")
    if version == UNFINISHED:
        raise LogDirectoryError(
            f"log.dirs: {directory} is incomplete: `mpbroker restore` did not end"
            " there; run it again"
        )
    if version != _VERSION:
        raise LogDirectoryError(
            f"log.dirs: {path} has version={version}; this release knows version 1"
        )
    try:
        return MetaProperties(
            values["cluster.id"],
            int(values["node.id"]),
            values.get("directory.id", ""),
        )
    except (KeyError, ValueError) as error:
        raise LogDirectoryError(
            f"log.dirs: {path}: cluster.id or node.id is missing or malformed ({error})"
        ) from None


def is_unfinished(directory: str) -> bool:
    """Return whether a restore began in a directory and did not end; raises OSError."""
    try:
        with open(os.path.join(directory, FILE_NAME), encoding="utf-8") as file:
            return f"version={UNFINISHED}" in file.read().splitlines()
    except FileNotFoundError:
        return False


def write_meta_properties(directory: str, properties: MetaProperties) -> None:
    """Create a directory if it does not exist, and write its identity to disk.

    Raises:
        LogDirectoryError: the directory cannot be created or written.
    """
    path = os.path.join(directory, FILE_NAME)
    text = (
        f"#\nnode.id={properties.node_id}\nversion={_VERSION}\n"
        f"cluster.id={properties.cluster_id}\n"
        f"directory.id={properties.directory_id}\n"
    )
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # If this process is killed before the rename, the directory has its old
        # identity, or still none.
        os.replace(path + ".tmp", path)
        sync_directory(directory)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space there" if is_full else "make it writable for this user"
        raise LogDirectoryError(
            f"log.dirs: cannot write to {directory}: {error.strerror}; {fix}, or use"
            " another directory"
        ) from None
