"""The images themselves, built and run: the broker's serves, and stops when told.

That of pipelines takes downloads of 500 MB and some minutes, and is built if
MPBROKER_PIPELINE_IMAGE is set:

    MPBROKER_PIPELINE_IMAGE=1 scripts/test tests/deploy/test_image.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer

from tests.bench import wire
from tests.support import container_image
from tests.support.broker import Broker
from tests.support.container_image import UnavailableError, command_in, run
from tests.support.ports import reusable_port

WITHIN_S: Final = 120.0
STATE: Final = "STATE_DIRECTORY"

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def image() -> dict[str, Any]:
    """Return the image's configuration."""
    try:
        return container_image.build()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def container(image: dict[str, Any]) -> Iterator[str]:
    made = run("from", container_image.NAME)
    yield made
    run("rm", made)


def descendants(pid: int) -> list[int]:
    """Return a process's children, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def supervisor_of(process: subprocess.Popen[bytes], container: str) -> int:
    """Return the process that a container's engine would call its first.

    It is the first one of the image's user that is none of buildah's.
    """
    uid = int(subprocess.check_output(command_in(container, ["id", "-u"])))
    assert uid  # not root
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        for pid in descendants(process.pid):
            proc = Path(f"/proc/{pid}")
            is_ours = not proc.joinpath("cmdline").read_bytes().startswith(b"buildah")
            if is_ours and proc.stat().st_uid == uid:
                return pid
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError("no supervisor in the container")


def connect(process: subprocess.Popen[bytes], port: int) -> wire.Connection:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return wire.Connection(("127.0.0.1", port), WITHIN_S)
        except OSError:
            assert process.poll() is None, "the container has ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_image_serves_is_healthy_and_stops_when_told(
    image: dict[str, Any], container: str, tmp_path: Path
) -> None:
    port = reusable_port()
    environ = {"MPBROKER_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}"}
    command = [*image["Entrypoint"], *image["Cmd"]]
    health = image["Healthcheck"]["Test"]
    assert health[0] == "CMD"
    # There is no namespace of processes here, and other brokers may run.
    where = ["--data-dir", dict(each.split("=", 1) for each in image["Env"])[STATE]]
    check = command_in(container, [*health[1:], *where, "--timeout", "60"], environ)
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command_in(container, command, environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        supervisor = supervisor_of(process, container)
        with connect(process, port) as connection:
            connection.create_topic("topic")
            batch = wire.record_batch([wire.RecordSpec(b"value")])
            asked = wire.produce("topic", 0, batch, acks=-1)
            answer = wire.parse_produce(connection.ask(asked))
            assert answer == (wire.ERROR_NONE, 0)
            (stored,) = connection.read_all("topic", 0)
            assert stored.value == b"value"
        assert subprocess.run(check, capture_output=True).returncode == 0
        assert "request path: compiled core" in log.read_text()
        os.kill(supervisor, signal.Signals[image["StopSignal"]])
        assert process.wait(WITHIN_S) == 0, log.read_text()
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert subprocess.run(check, capture_output=True).returncode != 0


# Packed, as an engine pulls it. A base of Debian's packages has 61 MB, ours has 12.
MAX_MB: Final = 80
OURS_MB: Final = 20


def test_the_image_is_small(image: dict[str, Any]) -> None:
    base = container_image.packed_layers(container_image.BASE)
    layers = container_image.packed_layers(container_image.NAME)
    ours = sum(layers) - sum(base)
    print(f"image: {sum(layers) / 1e6:.1f} MB packed, {ours / 1e6:.1f} of them ours")
    assert layers[: len(base)] == base
    assert ours <= OURS_MB * 1e6
    assert sum(layers) <= MAX_MB * 1e6


@pytest.mark.parametrize("user", ["990:990", "123456:0"])
def test_the_image_serves_with_a_read_only_root(
    image: dict[str, Any], container: str, tmp_path: Path, user: str
) -> None:
    """As its own user, and as any user of group 0; as process 1."""
    port = reusable_port()
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir(mode=0o770)
    data.chmod(0o770)
    os.chown(data, 990, 0)  # an engine gives a new volume the image's owner and mode
    config = {
        **image,
        "Env": [*image["Env"], f"MPBROKER_LISTENERS=PLAINTEXT://127.0.0.1:{port}"],
    }
    command = [*image["Entrypoint"], *image["Cmd"]]
    with log.open("wb") as file:
        process = subprocess.Popen(
            container_image.read_only(container, config, data, user, command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        with connect(process, port) as connection:
            connection.create_topic("topic")
            batch = wire.record_batch([wire.RecordSpec(b"value")])
            asked = wire.produce("topic", 0, batch, acks=-1)
            answer = wire.parse_produce(connection.ask(asked))
            assert answer == (wire.ERROR_NONE, 0)
        (first,) = descendants(process.pid)[:1]

        def inside(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                container_image.beside(container, config, first, user, words),
                capture_output=True,
                text=True,
            )

        assert inside("touch", "/written").returncode != 0
        assert inside("touch", "/opt/mpbroker/written").returncode != 0
        assert inside("cat", "/proc/1/cmdline").stdout
        health = image["Healthcheck"]["Test"][1:]
        assert inside(*health, "--timeout", "60").returncode == 0
        os.kill(first, signal.Signals[image["StopSignal"]])
        assert process.wait(WITHIN_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Read-only file system" not in log.read_text()
    assert {each.stat().st_uid for each in data.rglob("*")} == {int(user.split(":")[0])}


DESCRIPTION: Final = """
[pipeline]
job = "ingest"
checkpoint = "/lake/checkpoint"
[source]
bootstrap = "{bootstrap}"
subscribe = "flights"
[value]
format = "json"
fields = {{carrier = "string", dep_delay = "double"}}
[table]
path = "/lake/flights"
format = "delta"
"""
COUNT: Final = """
from deltalake import DeltaTable
print(DeltaTable("/lake/flights").to_pyarrow_table().num_rows)
"""


@pytest.mark.skipif(
    "MPBROKER_PIPELINE_IMAGE" not in os.environ, reason="takes downloads of 500 MB"
)
@pytest.mark.timeout(3600)
def test_the_image_of_pipelines_brings_a_batch_into_a_table(
    image: dict[str, Any], make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    config = container_image.build_pipeline()
    bootstrap = make_broker().bootstrap
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(100):
        value = json.dumps({"carrier": "EV", "dep_delay": number / 2})
        producer.produce("flights", value)
    assert producer.flush(90) == 0
    description = tmp_path / "flights.toml"
    description.write_text(DESCRIPTION.format(bootstrap=bootstrap))
    container = run("from", container_image.PIPELINE)

    def done(*command: str) -> str:
        return subprocess.check_output(command_in(container, command), text=True)

    try:
        assert "Usage: mpbroker pipeline" in done(*config["Entrypoint"], *config["Cmd"])
        run("copy", "--chmod", "0644", container, str(description), "/flights.toml")
        report = done(
            *(*config["Entrypoint"], "pipeline", "run", "/flights.toml", "--once"),
            *("--json", "--master", "local[2]"),
        )
        assert json.loads(report)["rows"] == 100
        assert done("python", "-c", COUNT).split() == ["100"]
        # Those of the broker's image, which has no compiler.
        done("python", "-c", "from mpbroker.native import _columns, _core, _records")
    finally:
        run("rm", container)
