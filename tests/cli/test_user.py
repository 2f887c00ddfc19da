"""`mpbroker user`: who is added comes in, and who is deleted does not."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.support.broker import Broker

BOTH = ("SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def scram_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": ",".join(BOTH),
    }
    with Broker(tmp_path_factory.mktemp("scram") / "data", config) as broker:
        yield broker


@pytest.fixture(autouse=True)
def use_our_broker(scram_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", scram_broker.listeners["PLAINTEXT"])


@pytest.fixture
def comes_in(mpbroker, scram_broker):
    def ask(name, password, mechanism):
        settings = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": name,
            "sasl.password": password,
        }
        given = [word for item in settings.items() for word in ("-X", "=".join(item))]
        address = scram_broker.listeners["SASL_PLAINTEXT"]
        done = mpbroker("topic", "list", "-b", address, *given)
        assert done.code == 0 or "SASL_AUTHENTICATION_FAILED" in done.err
        return done.code == 0

    return ask


def test_who_is_added_comes_in_and_who_is_deleted_does_not(mpbroker, comes_in):
    assert not comes_in("alice", "pässword =,", BOTH[0])
    added = mpbroker("user", "set", "alice", stdin="pässword =,\n".encode())
    assert added.code == 0
    assert added.out.decode() == "".join(f"user alice: {each} set\n" for each in BOTH)
    assert all(comes_in("alice", "pässword =,", mechanism) for mechanism in BOTH)
    assert not comes_in("alice", "password =,", BOTH[0])

    one = ("--mechanism", "scram-sha-512")
    assert mpbroker("user", "set", "alice", *one, stdin=b"other").code == 0
    assert comes_in("alice", "other", BOTH[1])
    assert comes_in("alice", "pässword =,", BOTH[0])

    assert mpbroker("user", "delete", "alice", *one).code == 0
    assert not comes_in("alice", "other", BOTH[1])
    assert comes_in("alice", "pässword =,", BOTH[0])
    deleted = mpbroker("user", "delete", "alice")
    assert deleted.out == b"user alice: SCRAM-SHA-256 deleted\n"
    assert not comes_in("alice", "pässword =,", BOTH[0])


def test_users_are_listed_with_their_mechanisms(mpbroker):
    mpbroker("user", "set", "bob", stdin=b"x\n")
    carol = ("carol", "-m", BOTH[1], "--iterations", 8192, "--format", "json")
    made = json.loads(mpbroker("user", "set", *carol, stdin=b"x\n").out)
    assert made == {"name": "carol", "mechanisms": {BOTH[1]: 8192}}
    listed = mpbroker("user", "list").out.decode().splitlines()
    assert [line.split() for line in listed] == [
        ["USER", "MECHANISM", "ITERATIONS"],
        ["bob", BOTH[0], "4096"],
        ["bob", BOTH[1], "4096"],
        ["carol", BOTH[1], "8192"],
    ]
    told = mpbroker("user", "list", "carol", "carol", "--format", "json").out
    assert json.loads(told) == [{"name": "carol", "mechanisms": {BOTH[1]: 8192}}]
    assert mpbroker("user", "delete", "bob").code == 0
    gone = mpbroker("user", "delete", "carol", "--format", "json").out
    assert json.loads(gone) == {"name": "carol", "deleted": [BOTH[1]]}
    assert mpbroker("user", "list", "--format", "json").out == b"[]\n"


def test_who_is_not_there_is_not_found(mpbroker):
    for command in (
        ["list", "nobody"],
        ["delete", "nobody"],
        ["delete", "nobody", "-m", BOTH[0]],
    ):
        done = mpbroker("user", *command)
        assert done.code == ExitCode.NOT_FOUND, command
        assert "RESOURCE_NOT_FOUND" in done.err


def test_a_password_that_is_not_there_changes_nothing(mpbroker):
    assert mpbroker("user", "set", "dan", stdin=b"\nx").code == ExitCode.USAGE
    assert mpbroker("user", "set", "dan", stdin=b"\xff\n").code == ExitCode.ERROR
    assert mpbroker("user", "list", "dan").code == ExitCode.NOT_FOUND


def test_a_terminal_is_asked_twice_and_shows_nothing(mpbroker, comes_in):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "mpbroker", "user", "set", "eve"]
    with subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        shown = b""
        for _ in range(2):
            while not shown.endswith(b": "):
                shown += os.read(main_end, 1000)
            os.write(main_end, b"s3cret\n")
            shown += os.read(main_end, 1)
        assert process.wait() == 0
    os.close(main_end)
    assert b"s3cret" not in shown
    assert comes_in("eve", "s3cret", BOTH[0])
    assert mpbroker("user", "delete", "eve").code == 0
