"""What cannot start says why in a line: the setting, its value, the limit, the fix."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

TIMEOUT_S = 60


def refusal(
    settings: dict[str, object], wrapper: list[str] | None = None, *options: str
) -> tuple[int, str]:
    """Start a broker that ends by itself; return its exit code and what it said."""
    arguments = [*options, *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(
        [*(wrapper or []), sys.executable, "-m", "mpbroker", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def expect_one_line(code: int, said: str, *words: str, expected: int = 1) -> None:
    assert code == expected, said
    lines = said.splitlines()
    assert len(lines) == 1, said
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num.io.threads", "0"),
        ("num.io.threads", "many"),
        ("num.network.threads", "-1"),
        ("queued.max.requests", "0"),
        ("socket.request.max.bytes", "0"),
        ("log.segment.bytes", "1"),
        ("log.retention.ms", "soon"),
        ("log.cleanup.policy", "shred"),
        ("compression.type", "rar"),
        ("message.max.bytes", "-5"),
        ("listeners", "PLAINTEXT://127.0.0.1:99999"),
        ("listeners", "127.0.0.1:9092"),
        ("listeners", "GOPHER://127.0.0.1:0"),
        ("default.replication.factor", "0"),
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    settings: dict[str, object] = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": tmp_path / "data",
        key: value,
    }
    code, said = refusal(settings)
    # A value refused by itself is the command line's; listeners are judged together.
    expected = 1 if key == "listeners" else 2
    expect_one_line(code, said, key, value.partition(":")[0], expected=expected)
    assert not (tmp_path / "data").exists(), "it began before it had looked"


def test_a_service_manager_is_told_that_starting_again_cannot_help(
    tmp_path: Path,
) -> None:
    code, said = refusal(
        {"listeners": "nonsense", "log.dirs": tmp_path / "data"},
        ["env", f"NOTIFY_SOCKET={tmp_path / 'nobody'}"],
    )
    assert code == os.EX_CONFIG and "listeners" in said, said


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refusal(
            {
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
                "log.dirs": tmp_path / "data",
            }
        )
    expect_one_line(code, said, "listeners", str(port))


def test_who_names_an_address_of_another_host_is_told_to_name_one_of_this(
    tmp_path: Path,
) -> None:
    listener = "SSL://192.0.2.1:0"  # which nobody is warned of
    settings = {"listeners": listener, "log.dirs": tmp_path / "data"}
    code, said = refusal(settings | certificate(tmp_path))
    expect_one_line(code, said, f"listeners={listener}", "an address of this host")


def certificate(folder: Path) -> dict[str, object]:
    file = folder / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(
        str(file)
    )
    return {"ssl.keystore.type": "PEM", "ssl.keystore.location": file}


def test_a_pid_file_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": tmp_path / "data",
    }
    code, said = refusal(settings, None, f"--pid-file={tmp_path}/nowhere/pid")
    expect_one_line(code, said, f"--pid-file {tmp_path}/nowhere/pid", "No such file")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("key", ["request.log.path", "client.telemetry.log.path"])
def test_a_log_that_cannot_be_written_is_named_at_once(
    tmp_path: Path, key: str
) -> None:
    settings: dict[str, object] = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": tmp_path / "data",
        key: tmp_path / "nowhere" / "log",
    }
    code, said = refusal(settings)
    expect_one_line(code, said, f"{key}={tmp_path}/nowhere/log", "No such file")
    assert not (tmp_path / "data").exists()


def test_more_memory_for_requests_than_can_be_mapped_is_named(tmp_path: Path) -> None:
    for most in (1 << 54, (1 << 63) - 1):
        settings = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": tmp_path / "data",
            "queued.max.request.bytes": most,
        }
        expect_one_line(*refusal(settings), f"queued.max.request.bytes={most}", "lower")


def test_who_cannot_listen_is_not_warned_of_what_he_would_have_opened(
    tmp_path: Path,
) -> None:
    listener = "PLAINTEXT://192.0.2.1:0"
    code, said = refusal({"listeners": listener, "log.dirs": tmp_path / "data"})
    expect_one_line(code, said, f"listeners={listener}: cannot listen there")


def test_a_start_that_is_refused_leaves_anothers_pid_file_as_it_is(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pid"
    file.write_text("4711\n")
    (tmp_path / "data").write_text("")
    settings: dict[str, object] = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": tmp_path / "data",
    }
    code, _ = refusal(settings, None, f"--pid-file={file}")
    assert code == 1 and file.read_text() == "4711\n"


def test_too_little_address_space_is_named(tmp_path: Path) -> None:
    wrapper = ["sh", "-c", 'ulimit -v 400000; exec "$@"', "sh"]
    settings: dict[str, object] = {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": tmp_path / "data",
    }
    code, said = refusal(settings, wrapper)
    expect_one_line(code, said, "RLIMIT_AS", str(400000 * 1024), "ulimit -v unlimited")


def test_a_directory_that_cannot_be_made_is_named() -> None:
    # Nobody may make directories there, not even root.
    code, said = refusal(
        {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": "/proc/mpbroker"}
    )
    expect_one_line(code, said, "log.dirs", "/proc/mpbroker")


def test_a_file_instead_of_a_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("")
    code, said = refusal({"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": path})
    expect_one_line(code, said, "log.dirs", str(path))


def mounting(*commands: str) -> list[str]:
    """Return a prefix that runs these as root of a mount namespace of its own.

    Skips the test where no such namespace can be had.
    """
    prefix = ["unshare", "--mount"]
    if os.geteuid():
        prefix += ["--map-root-user"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1)")
    script = " && ".join([*commands, 'exec "$@"'])
    trial = subprocess.run(
        [*prefix, "sh", "-c", script, "sh", "true"], capture_output=True, text=True
    )
    if trial.returncode:
        pytest.skip(f"no mount namespace: {trial.stderr.strip()}")
    return [*prefix, "sh", "-c", script, "sh"]


def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    wrapper = mounting(f"mount -t tmpfs -o ro none {shlex.quote(str(path))}")
    code, said = refusal(
        {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": path}, wrapper
    )
    expect_one_line(code, said, "log.dirs", str(path))


def test_a_full_disk_at_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    where = shlex.quote(str(path))
    wrapper = mounting(
        f"mount -t tmpfs -o size=64k none {where}",
        f"(cat /dev/zero > {where}/filler; true) 2>/dev/null",
    )
    code, said = refusal(
        {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": path}, wrapper
    )
    expect_one_line(code, said, "log.dirs", str(path), "free some space there")


def test_a_full_dev_shm_is_named(tmp_path: Path) -> None:
    wrapper = mounting(
        "mount -t tmpfs -o size=4k none /dev/shm",
        "(cat /dev/zero > /dev/shm/filler; true) 2>/dev/null",
    )
    code, said = refusal(
        {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": tmp_path / "data",
        },
        wrapper,
    )
    expect_one_line(code, said, "/dev/shm")


def test_too_few_open_files_are_named(tmp_path: Path) -> None:
    wrapper = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh"]
    code, said = refusal(
        {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": tmp_path / "data",
        },
        wrapper,
    )
    expect_one_line(code, said)
    assert re.search(r"open files|RLIMIT_NOFILE|ulimit", said), said
