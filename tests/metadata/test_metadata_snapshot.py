"""Snapshots of the metadata log: what they keep, and deaths while they are written."""

import os
import signal
from pathlib import Path

import pytest

from mpbroker.metadata.kraft_records import decode_control
from mpbroker.metadata.metadata_batches import MetadataBatches
from mpbroker.metadata.metadata_files import find_files, segment_name, snapshot_name
from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.metadata_log import recover_metadata_log
from mpbroker.metadata.metadata_snapshot import write_snapshot
from mpbroker.protocol.records.control_record import parse_control_type
from mpbroker.protocol.records.record_batch import iter_batches, iter_records
from tests.metadata.test_kraft_node import voters_batch
from tests.support.kraft import kafka_log
from tests.support.metadata import NOW_MS, PlainCell, contents, in_child, start


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The log of a Kafka, with its voters, an index and a snapshot half written."""
    made = tmp_path / "__cluster_metadata-0"
    made.mkdir()
    (made / segment_name(0)).write_bytes(kafka_log() + voters_batch(169, 1))
    (made / segment_name(0)).with_suffix(".index").write_bytes(b"")
    (made / (snapshot_name(100, 1) + ".part")).write_bytes(b"half")
    (made / "leader-epoch-checkpoint").write_text("0\n1\n1 0\n")
    return made


def snapshot(directory: Path) -> None:
    files = find_files(str(directory))
    image, batches = MetadataImage(), MetadataBatches(files)
    for path in files.paths:
        for record in batches.decode(Path(path).read_bytes(), path, 0):
            image.replay(record)
    write_snapshot(str(directory), image.records(), batches, NOW_MS)


def all_of(directory: Path) -> object:
    one = start(directory.parent)
    image = one.image
    kept = sorted(image.kept)
    epochs = {name: topic.epochs for name, topic in image.topics.items()}
    by_name = sorted(contents(one)[0], key=lambda topic: topic[0])
    scram = {user: image.scram.of(user) for user in image.scram.users()}
    quotas = image.client_quotas.entities
    return (
        [topic[0:2] + topic[3:] for topic in by_name],
        *(list(image.acls), scram, quotas, image.configs, image.features, kept, epochs),
    )


def test_a_snapshot_has_everything_and_the_files_before_it_are_gone(directory):
    before = all_of(directory)
    snapshot(directory)
    assert sorted(each.name for each in directory.iterdir()) == [
        snapshot_name(170, 3),
        segment_name(170),
        "leader-epoch-checkpoint",
    ]
    assert all_of(directory) == before
    assert before[-1]["flights"] == {0: (1, 1), 1: (1, 1), 2: (1, 1)}


def test_a_snapshot_begins_with_its_header_and_voters_and_ends_with_a_footer(directory):
    snapshot(directory)
    data = (directory / snapshot_name(170, 3)).read_bytes()
    offset, controls = 0, []
    for header, batch in iter_batches(data):
        assert header.base_offset == offset
        assert header.partition_leader_epoch == 3
        offset = header.next_offset
        for record in iter_records(batch) if header.is_control else ():
            kind = parse_control_type(record)
            controls.append((kind, decode_control(kind, record.value)))
    assert [kind for kind, _ in controls] == [3, 6, 4]
    assert controls[0][1]["lastContainedLogTimestamp"] == NOW_MS
    assert controls[1][1]["voters"][0]["voterId"] == 1


def test_offsets_go_on_behind_a_snapshot_and_another_follows(directory):
    snapshot(directory)
    one = start(directory.parent)
    one.create_topic("more", 2)
    ((header, _),) = iter_batches((directory / segment_name(170)).read_bytes())
    assert (header.base_offset, header.partition_leader_epoch) == (170, 3)
    before = all_of(directory)
    snapshot(directory)
    assert {snapshot_name(173, 3), segment_name(173)} < {
        each.name for each in directory.iterdir()
    }
    assert all_of(directory) == before


@pytest.mark.parametrize("step", ["fsync", "rename", "unlink", "open"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_each_step_nothing_is_lost(directory, step, after):
    before = all_of(directory)
    # The start has removed the half of a snapshot.
    assert not list(directory.glob("*.part"))
    done = getattr(os, step)

    def die(*arguments: object, **options: object) -> None:
        if after:
            done(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        setattr(os, step, die)
        snapshot(directory)

    assert in_child(work) == -signal.SIGKILL
    assert all_of(directory) == before
    files = find_files(str(directory))
    left = {each.name for each in directory.glob("0*") if each.suffix != ".index"}
    assert left == {os.path.basename(path) for path in files.paths}


def test_a_large_topic_is_cut_into_batches(tmp_path):
    one = start(tmp_path)
    one.create_topic("large", 2500)
    directory = tmp_path / "__cluster_metadata-0"
    snapshot(directory)
    (path,) = directory.glob("*.checkpoint")
    sizes = [header.record_count for header, _ in iter_batches(path.read_bytes())]
    assert sizes == [1, 3, 1000, 1000, 501, 1]
    assert len(start(tmp_path).topic("large").partitions) == 2500


def test_readers_of_a_running_broker_start_at_the_snapshot(directory):
    snapshot(directory)
    cell = PlainCell()
    recover_metadata_log(str(directory.parent), cell, NOW_MS, may_rewrite=False)
    assert cell.end == sum(each.stat().st_size for each in directory.glob("0*"))
