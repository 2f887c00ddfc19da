"""`mpbroker store check`: what is missing, what is too much, what is repaired."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mpbroker.cli.remote.store_check import check
from mpbroker.cli.root import root
from mpbroker.protocol.records.record_batch import RecordBatchBuilder, set_base_offset
from mpbroker.storage.partition_directory import complete_directory
from mpbroker.storage.remote.metadata_copy import MetadataCopy
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import PartitionPlan, RemotePlan

_ID = bytes(range(16))


@pytest.fixture
def place(tmp_path):
    """Return the directory of a store with three segments and a copy of metadata."""
    (tmp_path / "store").mkdir()
    metadata = tmp_path / "home" / "__cluster_metadata-0"
    metadata.mkdir(parents=True)
    (metadata / f"{0:020}.log").write_bytes(b"topics")
    directory = tmp_path / "home" / "t-0"
    complete_directory(str(directory), _ID)
    for base in range(4):
        builder = RecordBatchBuilder()
        builder.append(1, None, b"x" * 100)
        placed = bytearray(builder.build())
        set_base_offset(memoryview(placed), base, 0)
        (directory / f"{base:020}.log").write_bytes(placed)
    store = ObjectStore(f"file://{tmp_path}/store")
    plan = PartitionPlan("t", _ID, 0, str(directory), 3, 0, 4)
    RemotePartition(store, "t", _ID, 0).run(plan)
    ids = frozenset({_ID})
    MetadataCopy(store, str(tmp_path / "home"), "c", 1).run(RemotePlan(ids, (plan,)))
    return tmp_path / "store"


def run(place, *options, answer=""):
    arguments = ["store", "check", "--from", f"file://{place}", *options]
    return CliRunner().invoke(root, arguments, input=answer, standalone_mode=False)


def test_a_store_in_order_has_nothing_to_tell(place):
    found = run(place)
    assert found.return_value == 0
    assert found.output == (
        "3 copied segments, 0 damaged or missing objects, 0 objects without a"
        " manifest\n"
    )


def test_objects_that_are_missing_or_cut_are_told(place):
    first, second, _ = sorted(place.rglob("*.log"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    sorted(place.rglob("*.indexes"))[2].unlink()
    next(
        path for path in (place / "metadata").iterdir() if path.name != "index"
    ).unlink()
    found = run(place, "--repair", "--yes")
    assert found.return_value == 1
    lines = found.output.splitlines()
    assert lines[0].startswith("t-0, offsets 0 to 0: ") and "is missing" in lines[0]
    assert lines[1].startswith("t-0, offsets 1 to 1: ")
    assert lines[1].endswith(f"has {second.stat().st_size} bytes, not 170")
    assert lines[2].startswith("t-0, offsets 2 to 2: ") and ".indexes is" in lines[2]
    assert lines[3].endswith("is missing: mpbroker restore cannot work")
    assert lines[4].startswith("3 copied segments, 4 damaged")


def test_contents_are_read_and_compared_if_the_user_wants_it(place):
    assert run(place, "--contents").return_value == 0
    first, second, _ = sorted(place.rglob("*.log"))
    for path in (first, sorted(place.rglob("*.indexes"))[1]):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert run(place).return_value == 0
    found = run(place, "--contents")
    assert found.return_value == 1
    lines = found.output.splitlines()
    other = "has other bytes than were written"
    assert lines[0].startswith("t-0, offsets 0 to 0: ")
    assert lines[0].endswith(f"{first.name} {other}, from byte 0 on")
    assert lines[1].startswith("t-0, offsets 1 to 1: ")
    assert lines[1].endswith(f"{second.stem}.indexes {other}")
    assert lines[2].startswith("3 copied segments, 2 damaged")


def test_objects_without_a_manifest_are_deleted_if_the_user_says_so(place):
    orphan = Path(place, _ID.hex(), "0", f"{9:020}-ab.log")
    other = Path(place, "ff" * 16, "3", f"{0:020}-cd.indexes")
    other.parent.mkdir(parents=True)
    for path in (orphan, other):
        path.write_bytes(b"left over")
    Path(place, "metadata", "not-yet-named").write_bytes(b"a piece of the next copy")
    kept = {path for path in place.rglob("*") if path.is_file()} - {orphan, other}
    assert run(place).return_value == 1
    assert run(place, "--repair", answer="n\n").return_value == 1
    assert orphan.exists() and other.exists()
    found = run(place, "--repair", answer="y\n")
    assert found.return_value == 0
    assert "2 objects without a manifest" in found.output
    assert {path for path in place.rglob("*") if path.is_file()} == kept
    assert run(place).return_value == 0


def test_a_damaged_manifest_makes_no_object_an_orphan(place):
    manifest = next(place.rglob("manifest"))
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    found = run(place, "--repair", "--yes")
    assert found.return_value == 1 and "is damaged" in found.output
    assert len(list(place.rglob("*.log"))) == 3


@pytest.mark.parametrize("also", ["manifest", "metadata/index"])
def test_a_manifest_that_was_lost_makes_no_object_an_orphan(place, also):
    next(place.rglob("manifest")).unlink()
    (place / also).unlink(missing_ok=True)
    found = run(place, "--repair", "--yes")
    assert found.return_value == 1
    assert "0/manifest is missing, which names 6 objects" in found.output
    assert "0 objects without a manifest" in found.output.replace("\n", "")
    assert len(list(place.rglob("*.log"))) == 3


def test_what_a_running_broker_changes_meanwhile_is_no_finding(place, monkeypatch):
    """A segment is copied, and another removed, behind the listing."""
    store = ObjectStore(f"file://{place}")
    home = place.parent / "home" / "t-0"
    plan = PartitionPlan("t", _ID, 0, str(home), 3, 2, 4)
    whole = ObjectStore.list

    def listing(self, prefix):
        found = list(whole(self, prefix))
        if not prefix:
            RemotePartition(store, "t", _ID, 0).run(plan)
        yield from found

    monkeypatch.setattr(ObjectStore, "list", listing)
    found = check(store)
    assert found == (1, (), ())
