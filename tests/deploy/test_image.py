"""The images themselves, built and run: the broker's serves, and stops when told.

They are built if the base is there, which `python -m tests.support.container_image`
makes. That of pipelines takes downloads of 500 MB and some minutes, and is built if
MPBROKER_PIPELINE_IMAGE is set:

    MPBROKER_PIPELINE_IMAGE=1 scripts/test tests/deploy/test_image.py
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer

from deploy import image as images
from deploy.release import ReleaseError
from tests.bench import wire
from tests.support import container_image
from tests.support.broker import Broker
from tests.support.container_image import UnavailableError
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def image() -> Iterator[images.Stage]:
    try:
        with container_image.built() as stage:
            yield stage
    except UnavailableError as error:
        pytest.skip(str(error))


def descendants(pid: int) -> list[int]:
    """Return a process's children, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def connect(process: subprocess.Popen[bytes], port: int) -> wire.Connection:
    deadline = time.monotonic() + LONGEST_S
    while True:
        try:
            return wire.Connection(("127.0.0.1", port), LONGEST_S)
        except OSError:
            assert process.poll() is None, "the container has ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)


# Packed, as an engine pulls it. A base of Debian's packages has 61 MB, ours has 12.
MAX_MB: Final = 80
OURS_MB: Final = 20


def layers_of(archive: Path) -> list[bytes]:
    """Return the layers of an archive, packed, by its index as an engine reads it."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        def blob(descriptor: dict[str, Any]) -> bytes:
            data = read("blobs/" + descriptor["digest"].replace(":", "/"))
            assert len(data) == descriptor["size"]
            return data

        (named,) = json.loads(read("index.json"))["manifests"]
        manifest = json.loads(blob(named))
        (older,) = json.loads(read("manifest.json"))
        assert json.loads(read(older["Config"])) == json.loads(blob(manifest["config"]))
        layers = [blob(each) for each in manifest["layers"]]
        assert [read(name) for name in older["Layers"]] == layers
        return layers


def test_the_image_is_small(image: images.Stage, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    images.write_archive(image, images.make_base(), "mpbroker:latest", archive, 2**30)
    base, ours = map(len, layers_of(archive))
    print(f"image: {(base + ours) / 1e6:.1f} MB packed, {ours / 1e6:.1f} of them ours")
    assert ours <= OURS_MB * 1e6
    assert base + ours <= MAX_MB * 1e6


@pytest.mark.parametrize("user", ["990:990", "123456:0"])
def test_the_image_serves_with_a_read_only_root_and_stops_when_told(
    image: images.Stage, tmp_path: Path, user: str
) -> None:
    """As its own user, and as any user of group 0; as process 1."""
    config = image.image_config()
    port = reusable_port()
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir(mode=0o770)
    data.chmod(0o770)
    os.chown(data, 990, 0)  # an engine gives a new volume the image's owner and mode
    environ = [f"MPBROKER_LISTENERS=PLAINTEXT://127.0.0.1:{port}"]
    command = [*config["Entrypoint"], *config["Cmd"]]
    with log.open("wb") as file:
        process = subprocess.Popen(
            container_image.read_only(image, data, user, command, environ),
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
            (stored,) = connection.read_all("topic", 0)
            assert stored.value == b"value"
        (first,) = descendants(process.pid)[:1]

        def inside(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                container_image.beside(image, first, user, words),
                capture_output=True,
                text=True,
            )

        assert inside("touch", "/written").returncode != 0
        assert inside("touch", "/opt/mpbroker/written").returncode != 0
        assert inside("cat", "/proc/1/cmdline").stdout
        health = config["Healthcheck"]["Test"]
        assert health[0] == "CMD"
        assert inside(*health[1:], "--timeout", "60").returncode == 0
        os.kill(first, signal.Signals[config["StopSignal"]])
        assert process.wait(LONGEST_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "request path: compiled core" in log.read_text()
    assert "Read-only file system" not in log.read_text()
    assert {each.stat().st_uid for each in data.rglob("*")} == {int(user.split(":")[0])}


# -- the builder, which needs no root for what says no RUN -----------------------------

DOCKERFILE: Final = """\
# A comment.
ARG BASE=base
FROM ${BASE} AS first
COPY code top.txt /src/
FROM ${BASE}
COPY --from=first /src /opt
ENV PATH=/opt/bin:$PATH \\
    NAME='a b'
WORKDIR /work
USER somebody
VOLUME ["/data"]
EXPOSE 9092
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --start-period=2m --retries=3 \\
    CMD ["check", "it"]
ENTRYPOINT ["program"]
CMD ["serve"]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a Dockerfile, what it copies, a base and a scratch folder."""
    for name in ("code/bin/program", "code/made.so", "top.txt", "base/etc/kept"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "stages").mkdir()
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "Dockerfile.dockerignore").write_text("*\n!code\n**/*.so\n")
    return tmp_path


def build(place: Path) -> images.Stage:
    base = images.Stage(place / "base")
    return images.build(place / "Dockerfile", place, base, place / "stages")


def test_a_dockerfile_s_instructions_become_files_and_settings(place: Path) -> None:
    stage = build(place)
    files = [each for each in stage.root.rglob("*") if each.is_file()]
    assert {str(each.relative_to(stage.root)) for each in files} == {
        *("etc/kept", "opt/bin/program", "opt/top.txt")
    }
    assert (stage.root / "work").is_dir()
    config = stage.image_config()
    (path, name) = config.pop("Env")
    assert path.startswith("PATH=/opt/bin:/usr/local/sbin:") and name == "NAME=a b"
    assert config == {
        "WorkingDir": "/work",
        "User": "somebody",
        "Volumes": {"/data": {}},
        "ExposedPorts": {"9092/tcp": {}},
        "StopSignal": "SIGTERM",
        "Healthcheck": {
            "Test": ["CMD", "check", "it"],
            "Interval": 15 * 10**9,
            "StartPeriod": 120 * 10**9,
            "Retries": 3,
        },
        "Entrypoint": ["program"],
        "Cmd": ["serve"],
    }


def test_what_the_builder_does_not_know_is_refused(place: Path) -> None:
    file = place / "Dockerfile"
    for more, said in (
        ("ONBUILD RUN true", "ONBUILD"),
        ("RUN true", "RUN as somebody"),
    ):
        file.write_text(f"{DOCKERFILE}{more}\n")
        (place / "again").mkdir(exist_ok=True)
        with pytest.raises(ReleaseError, match=said):
            images.build(file, place, images.Stage(place / "base"), place / "again")
        (place / "again").rename(place / said)


def test_an_archive_has_the_base_and_what_differs_from_it(place: Path) -> None:
    base = place / "base"
    (base / "gone").write_text("")
    stage = build(place)
    (stage.root / "gone").unlink()
    archive = place / "image.tar"
    size = images.write_archive(stage, base, "ours:1", archive, 2**30)
    layers = layers_of(archive)
    assert size == sum(map(len, layers))
    names = []
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
            names.append({each.name for each in tar if not each.isdir()})
    assert names[0] == {"etc/kept", "gone"}
    assert names[1] == {".wh.gone", "opt/bin/program", "opt/top.txt"}


# -- pipelines -------------------------------------------------------------------------

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
    image: images.Stage, make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    bootstrap = make_broker().bootstrap
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(100):
        value = json.dumps({"carrier": "EV", "dep_delay": number / 2})
        producer.produce("flights", value)
    assert producer.flush(90) == 0
    lake = tmp_path / "lake"
    lake.mkdir()
    description = lake / "flights.toml"
    description.write_text(DESCRIPTION.format(bootstrap=bootstrap))
    os.chown(lake, 990, 0)
    with container_image.built_pipeline(image) as pipeline:
        config = pipeline.image_config()

        def done(*command: str) -> str:
            words = container_image.read_only(pipeline, lake, "990:990", command)
            return subprocess.check_output(words, text=True)

        assert "Usage: mpbroker pipeline" in done(*config["Entrypoint"], *config["Cmd"])
        report = done(
            *(*config["Entrypoint"], "pipeline", "run", "/lake/flights.toml", "--once"),
            *("--json", "--master", "local[2]"),
        )
        assert json.loads(report)["rows"] == 100
        assert done("python", "-c", COUNT).split() == ["100"]
        # Those of the broker's image, which has no compiler.
        done("python", "-c", "from mpbroker.native import _columns, _core, _records")
