"""Make a node's copy of the cluster's metadata log, at its start.

The copy is a separate log in the directory `__cluster_metadata-0`, with the mark
COPY_MARK. The directory gets this name when the copy is complete. If a broker that had
topics and settings before is the first node, they become the first records of the
cluster's log. The broker's former log is kept beside the copy.

At a later start, the copy gets what the other nodes have changed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Final
from uuid import UUID

from mpbroker.base.directories import sync_directory
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from mpbroker.metadata.kraft_records import (
    UnknownRecordError,
    decode_record,
    encode_record,
)
from mpbroker.metadata.metadata_batches import MetadataBatches
from mpbroker.metadata.metadata_files import MetadataFiles
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    first_records,
)
from mpbroker.metadata.metadata_log import (
    COPY_MARK,
    is_copy,
    metadata_log_end,
    metadata_log_path,
    recover_metadata_log,
    write_log,
)

_UNFINISHED: Final = ".unfinished"
_BEFORE: Final = ".before-cluster"
_RECORDS_IN_A_BATCH: Final = 1000
_SHOWN: Final = 3


async def adopt_metadata(
    log: SharedMetadataLog,
    log_dir: str,
    directory: UUID,
    node_id: int,
    *,
    is_member: bool,
) -> None:
    """Make this node's copy of the cluster's metadata log, unless there is one.

    If the process is killed during this call, the next call goes on: the database has
    stored the id of the directory whose node has begun the cluster's log.

    Args:
        log_dir: the first directory of ``log.dirs``.
        directory: the id of ``log_dir``.
        is_member: whether the directory belongs to a node already. If not, a copy that
            is there was left by an earlier attempt to join, perhaps another cluster,
            and is replaced.

    Raises:
        ClusterError: the broker has topics or settings of its own, and the cluster has
            others; or the database was restored from an old backup.
        CorruptLogError, LogDirectoryError, OSError: as recover_metadata_log().
    """
    has_copy = is_copy(log_dir)
    if has_copy and is_member:
        return
    own = None if has_copy else _own_image(log_dir, node_id)
    first = first_records() if own is None else list(_records_of(own, node_id))
    begun = await log.append(0, [encode_record(each) for each in first], directory)
    records = [decode_record(each) for each in await log.read(0)]
    if own is not None and not begun:
        _refuse_strangers(log_dir, own, records)
    _write_copy(log_dir, records)


async def metadata_news(log: SharedMetadataLog, log_dir: str) -> bytes:
    """Return the batches of the cluster's metadata log that a node's copy lacks.

    Args:
        log_dir: the first directory of ``log.dirs``, which has a copy.

    Raises:
        ClusterError: a record was written by a newer version of mpbroker.
        CorruptLogError, OSError: the copy cannot be read.
    """
    batches = MetadataBatches(MetadataFiles(None, ()))
    batches.next_offset = metadata_log_end(log_dir)
    try:
        records = [decode_record(each) for each in await log.read(batches.next_offset)]
    except UnknownRecordError as error:
        raise ClusterError(
            "another node has changed the metadata with a newer mpbroker:"
            f" {error}; upgrade this one, too"
        ) from None
    now_ms = time.time_ns() // 1_000_000
    news = b""
    for start in range(0, len(records), _RECORDS_IN_A_BATCH):
        part = records[start : start + _RECORDS_IN_A_BATCH]
        news += batches.encode(part, now_ms)
        batches.next_offset += len(part)
    return news


class _Cell:
    """A LogCell outside of shared memory, for a log that only this process has open."""

    end = 0

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _own_image(log_dir: str, node_id: int) -> MetadataImage | None:
    """Return the topics and settings in a broker's own metadata log.

    Return None if there is no log, or if it has only the features of a new broker.
    """
    if not os.path.isdir(os.path.dirname(metadata_log_path(log_dir))):
        return None
    now_ms = time.time_ns() // 1_000_000
    image = recover_metadata_log(
        log_dir, _Cell(), now_ms, node_id=node_id, may_rewrite=False
    )
    is_new = image.live_record_count() == len(image.kafka_features())
    return None if is_new else image


def _records_of(image: MetadataImage, node_id: int) -> Iterator[MetadataRecord]:
    for group in image.records():
        for record in group:
            if record["type"] == "PartitionRecord":
                place = [node_id]
                yield {**record, "replicas": place, "isr": place, "leader": node_id}
            else:
                yield record


def _refuse_strangers(
    log_dir: str, own: MetadataImage, records: Sequence[MetadataRecord]
) -> None:
    """Raise ClusterError if a broker has topics or settings that the cluster lacks.

    If the cluster has all of the broker's topics, 'mpbroker restore' has made the
    directory from a backup of the cluster.

    Args:
        records: the records of the cluster's metadata log.
    """
    known = {each["topicId"] for each in records if each["type"] == "TopicRecord"}
    names = sorted(
        each.name for each in own.topics.values() if each.id_text not in known
    )
    if own.topics and not names:
        return
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    what = f"{len(names)} topic(s) ({shown})" if names else "users, ACLs or settings"
    raise ClusterError(
        f"log.dirs: {log_dir} has {what} of its own, and the cluster has others: start"
        " this broker with new log.dirs, and copy its topics into the cluster with"
        " 'mpbroker mirror'"
    )


def _write_copy(log_dir: str, records: Sequence[MetadataRecord]) -> None:
    path = metadata_log_path(log_dir)
    place = os.path.dirname(path)
    unfinished = place + _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    # The mark is written before the directory gets its name, so that a copy is never
    # taken for a broker's own log.
    with open(os.path.join(unfinished, COPY_MARK), "x"):
        pass
    write_log(
        os.path.join(unfinished, os.path.basename(path)),
        [
            records[start : start + _RECORDS_IN_A_BATCH]
            for start in range(0, len(records), _RECORDS_IN_A_BATCH)
        ],
        time.time_ns() // 1_000_000,
    )
    if is_copy(log_dir):
        shutil.rmtree(place)
    elif os.path.isdir(place):
        shutil.rmtree(place + _BEFORE, ignore_errors=True)
        os.rename(place, place + _BEFORE)
    os.rename(unfinished, place)
    sync_directory(log_dir)
