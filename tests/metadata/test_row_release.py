"""RowRelease: when a process says that it has let go of deleted partitions."""

import errno

from mpbroker.ipc.layout import CONTROL_WORDS, HOUSEKEEPER
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables import row_users
from mpbroker.ipc.tables.shared_log_cell import SharedLogCell
from mpbroker.metadata.metadata_log import recover_metadata_log
from mpbroker.metadata.row_release import RowRelease
from mpbroker.metadata.topics import RegistryHooks
from tests.support.metadata import METADATA_CELL, NOW_MS, registry


def shared_cell(tmp_path):
    control = Segment.create("control", CONTROL_WORDS * 8)
    SharedLogCell.initialise(control, METADATA_CELL)
    cell = SharedLogCell(control, METADATA_CELL)
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    return cell, control.words


def test_what_is_still_held_is_let_go_of_later(tmp_path):
    cell, words = shared_cell(tmp_path)
    held, forgotten = {1}, []
    release = RowRelease(
        words,
        3,
        lambda: own,
        lambda rows: bool(held & set(rows)),
        lambda rows: forgotten.append(set(rows)),
    )
    hooks = RegistryHooks(on_removed=release.removed)
    own = registry(tmp_path, cell, hooks=hooks)
    other = registry(tmp_path, cell)
    for user in (3, HOUSEKEEPER):
        row_users.begins(words, user)
    assert row_users.passed(words) == -1
    row_users.is_gone(words, HOUSEKEEPER)
    release.look()
    assert row_users.passed(words) == other.version
    other.create_topic("a", 3)
    before = other.version
    release.look()
    other.delete_topic("a")
    release.look()
    assert row_users.passed(words) == before  # row 1 is held
    assert own.topic("a") is None
    held.clear()
    release.look()
    assert row_users.passed(words) == other.version
    # At the beginning, then only after deletions: to make a topic costs nothing.
    assert forgotten == [set(), {0, 1, 2}]
    row_users.is_gone(words, 3)
    assert row_users.passed(words) > other.version  # there is no process


def test_a_metadata_log_that_cannot_be_read_now_ends_no_process(tmp_path, monkeypatch):
    """It looks between requests, where no request can be told of the error."""
    cell, words = shared_cell(tmp_path)
    own, other = registry(tmp_path, cell), registry(tmp_path, cell)
    release = RowRelease(words, 3, lambda: own)
    release.look()
    before = other.version
    other.create_topic("a", 3)

    def fail():
        raise OSError(errno.EIO, "the disk")

    with monkeypatch.context() as patched:
        patched.setattr(own._log, "read_new", fail)
        release.look()
        assert row_users.passed(words) == before
    release.look()
    assert row_users.passed(words) == other.version
