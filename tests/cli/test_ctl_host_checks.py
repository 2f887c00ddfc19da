"""The doctor's checks of the machine, on machines that have what each looks for."""

from __future__ import annotations

import os
import resource

import pytest

from mpbroker.cli.ctl import ctl_host_checks as checks
from mpbroker.cli.ctl.ctl_host_checks import FAIL, OK, WARN
from mpbroker.cli.ctl.ctl_text import duration, plural, size

MOUNTS = """\
20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
21 20 0:5 / /dev/shm rw shared:2 - tmpfs tmpfs rw
22 20 0:6 / /srv/a\\040disk rw - xfs /dev/sdb rw
23 20 0:7 / /srv/remote rw master:3 - nfs4 host:/x rw
24 20 0:8 / /layer rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/srv/a disk/data", "xfs"),
        ("/srv/remote", "nfs4"),
    ],
)
def test_a_path_is_on_the_file_system_of_its_longest_mount(path, kind):
    assert checks.file_system_of(path, MOUNTS) == kind


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", OK), ("tmpfs", FAIL), ("nfs4", WARN), ("overlay", WARN), ("odd", WARN)],
)
def test_a_file_system_is_judged_by_what_it_keeps(kind, level, monkeypatch):
    monkeypatch.setattr(checks, "file_system_of", lambda path, mounts: kind)
    finding = checks.check_file_system("/data")
    assert finding.level == level
    assert finding.fix or level == OK


def test_a_disk_is_timed_and_nothing_is_left_on_it(tmp_path):
    finding = checks.check_sync(str(tmp_path))
    assert finding.level in (OK, WARN) and "fdatasync takes" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_a_failure(tmp_path):
    finding = checks.check_sync(str(tmp_path / "not there"))
    assert finding.level == FAIL and "No such file" in finding.text


@pytest.mark.parametrize(
    ("free", "level"), [(1 << 20, FAIL), (500 << 20, WARN), (90 << 30, OK)]
)
def test_disk_space_is_judged_by_what_is_left(free, level, monkeypatch):
    total = 100 << 30

    class Found:
        f_frsize = 4096
        f_bavail = free // 4096
        f_blocks = total // 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Found)
    assert checks.check_disk_space("/data").level == level


def test_few_open_files_are_told_with_what_to_do():
    pid = os.getpid()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert checks.check_open_files(pid, 10 * soft).level == FAIL
    finding = checks.check_open_files(pid, 0)
    assert f"{soft:,} allowed" in finding.text and "LimitNOFILE" in finding.fix


def test_shared_memory_that_is_not_there_is_a_failure(tmp_path):
    assert checks.check_shared_memory(str(tmp_path)).level in (OK, WARN)
    assert checks.check_shared_memory(str(tmp_path / "none")).level == FAIL


def test_jumps_of_the_clock_are_told_with_the_largest():
    assert len(list(checks.check_clock(None))) == 1
    told = list(checks.check_clock([0.7, -3600.0, 2.0]))[-1]
    assert told.level == WARN
    assert "3 times" in told.text and "-3600.0 s" in told.text


def test_remove_ipc_matters_to_users_that_log_out_only(tmp_path):
    assert checks.check_remove_ipc(1000, tmp_path) is None  # no logind here
    (tmp_path / "logind.conf").write_text("[Login]\n#RemoveIPC=no\n")
    assert checks.check_remove_ipc(0, tmp_path) is None
    assert checks.check_remove_ipc(998, tmp_path) is None
    assert checks.check_remove_ipc(1000, tmp_path).level == WARN
    (tmp_path / "logind.conf.d").mkdir()
    (tmp_path / "logind.conf.d" / "ipc.conf").write_text("[Login]\nRemoveIPC = no\n")
    assert checks.check_remove_ipc(1000, tmp_path).level == OK


@pytest.mark.parametrize(
    ("core", "machine", "level"),
    [
        ("compiled core", "x86_64", OK),
        ("compiled core", "aarch64", OK),
        ("pure Python; ...", "x86_64", WARN),
        ("pure Python; ...", "aarch64", FAIL),
    ],
)
def test_pure_python_is_slow_on_one_machine_and_wrong_on_others(core, machine, level):
    (finding,) = checks.check_python("3.11.7", core, machine)
    assert finding.level == level


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.0123, "12 ms"),
        (4.25, "4.2 s"),
        (61, "1 min 1 s"),
        (3 * 3600 + 720, "3 h 12 min"),
        (3 * 86400 + 3600, "3 d 1 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_numbers_are_written_for_people():
    assert [size(0), size(999), size(1024), size(1.5 * 2**30)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "1.5 GiB",
    ]
    assert [plural(1, "record"), plural(1234, "record")] == [
        "1 record",
        "1,234 records",
    ]


@pytest.mark.parametrize(
    ("mode", "level"),
    [(0o750, OK), (0o700, OK), (0o755, WARN), (0o701, WARN)],
)
def test_a_data_directory_that_others_can_enter_is_warned_of(tmp_path, mode, level):
    tmp_path.chmod(mode)
    finding = checks.check_permissions(str(tmp_path))
    assert finding.level == level and f"{mode:04o}" in finding.text
    assert (f"chmod -R o= {tmp_path}" == finding.fix) == (level == WARN)
    assert checks.check_permissions(f"{tmp_path}/gone").level == FAIL
