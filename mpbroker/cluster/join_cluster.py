"""Claim a node id in the cluster; give new directories its identity and metadata.

A broker's start does this in a separate process, because the libraries for the network
start threads:

    python -m mpbroker.cluster.join_cluster [--check] < SETTINGS

The settings are JSON, see ``NodeSettings``. On stdout are the batches of the cluster's
metadata that the directories do not have yet. The start appends them to the node's copy
before it serves: otherwise its first clients would be answered by the topics and ACLs
of the time when the node was stopped. An error is one line on stderr, which tells an
operator what to do.

With --check nothing is claimed or changed: a program that will take over a running node
looks whether it can use the database.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.cluster.errors import ClusterError
from mpbroker.metadata.meta_properties import (
    MetaProperties,
    open_data_directories,
    random_uuid,
    read_meta_properties,
    uuid_of_text,
    uuid_to_text,
    write_meta_properties,
)

_DATABASE_S: Final = 15.0
_STORE_S: Final = 10.0


class NodeSettings(NamedTuple):
    """The settings with which a broker joins a cluster.

    Attributes:
        database: cluster.database.url.
        storage: diskless.storage.url, with endpoint and region.
        log_dirs: the data directories, which exist.
    """

    database: str
    storage: str
    log_dirs: Sequence[str]
    node_id: int
    rack: str | None
    listeners: Sequence[str]


def node_directory(log_dirs: Sequence[str]) -> UUID:
    """Return the directory id by which a cluster recognizes a node after a restart.

    It is the id in the first directory's meta.properties, or a new id if that file does
    not exist yet.

    Raises:
        MpbrokerError: meta.properties has no directory.id, like Kafka's old files.
    """
    found = read_meta_properties(log_dirs[0])
    if found is None:
        return UUID(bytes=random_uuid())
    try:
        return UUID(bytes=uuid_of_text(found.directory_id))
    except ValueError:
        raise MpbrokerError(
            f"log.dirs: {log_dirs[0]}/meta.properties has no directory.id: a node of a"
            " cluster needs a directory that mpbroker has made"
        ) from None


async def join(settings: NodeSettings) -> bytes:
    """Check the database, the store and the directories of a node, and claim its id.

    Returns:
        The batches that are to be appended to the node's copy of the metadata.

    Raises:
        MpbrokerError: the broker cannot be this node of this cluster.
    """
    # Imported here, so that main() can tell the operator if a library is missing.
    from mpbroker.base.store_url import StoreUrl
    from mpbroker.cluster.database import ClusterDatabase
    from mpbroker.cluster.live_nodes import SEEN_AFTER_S, LiveNodes, live_nodes
    from mpbroker.cluster.membership import Membership, NodeDescription
    from mpbroker.cluster.metadata_adoption import adopt_metadata, metadata_news
    from mpbroker.cluster.migrations import (
        check_cluster,
        load_migrations,
        read_cluster,
    )
    from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
    from mpbroker.storage.remote.object_store import ObjectStore
    from mpbroker.storage.remote.store_owner import check_rights

    known = {path: read_meta_properties(path) for path in settings.log_dirs}
    old = [path for path, found in known.items() if found is not None]
    own_cluster = open_data_directories(old, settings.node_id) if old else None
    async with ClusterDatabase(settings.database, timeout_s=_DATABASE_S) as database:
        info = await read_cluster(database)
        check_cluster(
            info,
            version=load_migrations()[-1].version,
            cluster_id=own_cluster,
            storage_url=StoreUrl.parse(settings.storage).url,
        )
        check_rights(ObjectStore(settings.storage, retry_s=_STORE_S))
        directory = node_directory(settings.log_dirs)
        log = SharedMetadataLog(database)
        first = settings.log_dirs[0]
        is_member = known[first] is not None
        await adopt_metadata(
            log, first, directory, settings.node_id, is_member=is_member
        )
        news = await metadata_news(log, first)  # before the claim: it may refuse
        node = NodeDescription(
            *(directory, settings.listeners, __version__),
            *(settings.node_id, settings.rack),
        )
        await Membership(database, node).join()
        # All nodes must name each other when the first client comes: some clients fail
        # requests that wait for the answer of a node that the last Metadata lacks.
        if len(await live_nodes(database)) > 1:
            await asyncio.sleep(SEEN_AFTER_S)
            news = await metadata_news(log, first)
        await LiveNodes(database, first).look()
    # Written last: until all checks have passed, the directory belongs to no cluster,
    # so the operator can correct the settings and try again.
    if not is_member:
        text = uuid_to_text(directory.bytes)
        identity = MetaProperties(info.cluster_id, settings.node_id, text)
        write_meta_properties(first, identity)
    open_data_directories(settings.log_dirs, settings.node_id)
    return news


async def check(settings: NodeSettings) -> bytes:
    """Check that this version of mpbroker can work with the cluster's database.

    Returns:
        Nothing: b"".

    Raises:
        ClusterError: it cannot; or the database gives no answer.
    """
    from mpbroker.cluster.database import ClusterDatabase
    from mpbroker.cluster.migrations import (
        check_cluster,
        load_migrations,
        read_cluster,
    )

    async with ClusterDatabase(settings.database, timeout_s=_DATABASE_S) as database:
        newest = load_migrations()[-1].version
        check_cluster(await read_cluster(database), version=newest)
    return b""


def main(text: bytes, arguments: Sequence[str] = ()) -> int:
    """Do as the arguments and the settings on stdin say; return the exit code."""
    given: dict[str, Any] = orjson.loads(text)
    work = check if "--check" in arguments else join
    try:
        news = asyncio.run(work(NodeSettings(**given)))
    except ModuleNotFoundError as error:
        return _fail(
            f"cluster.database.url: {error.name} is missing:"
            " pip install 'mpbroker-server[cluster]'"
        )
    except ClusterError as error:
        return _fail(f"cluster.database.url: {error}")
    except (MpbrokerError, OSError) as error:
        return _fail(str(error))
    sys.stdout.buffer.write(news)
    sys.stdout.flush()
    return 0


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.read(), sys.argv[1:]))
