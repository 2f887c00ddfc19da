"""MpbrokerContainer, with an engine that runs what it is told here, as a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from testcontainers.core import container as core

from mpbroker import Consumer, Producer
from mpbroker.config.sources import settings_of_environment
from mpbroker.testing.testcontainer import ContainerNotReadyError, MpbrokerContainer
from tests.support.ports import reusable_port
from tests.test_document_snippets import CLIENT, the_block


class Engine:
    """What DockerContainer calls of a client of Docker, and of the container.

    A port that the container exposes is another one here, as with Docker, and /tmp and
    the data directory are the container's own.
    """

    def __init__(self, folder):
        self.folder = folder
        self.short_id = self.id = "container"
        self.status = "running"
        self.client = SimpleNamespace(close=lambda: None)
        self.process = None
        self.port_outside = reusable_port()
        programs = folder / "bin"
        programs.mkdir()
        command = programs / "mpbroker"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m mpbroker "$@"\n')
        command.chmod(0o755)

    def create(self, image, *, environment, ports, entrypoint, **_):
        self.image = image
        (self.port_inside,) = (int(str(port).partition("/")[0]) for port in ports)
        here = {key: self._outside(value) for key, value in environment.items()}
        self.environ = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "STATE_DIRECTORY": str(self.folder / "data"),
            "RUNTIME_DIRECTORY": str(self.folder),
            **here,
        }
        self.words = [self._inside(word) for word in entrypoint]
        return self

    def _outside(self, text):
        return re.sub(r"0\.0\.0\.0:(\d+)$", f"127.0.0.1:{self.port_outside}", str(text))

    def _inside(self, text):
        return text.replace("/tmp/", f"{self.folder}/")

    def start(self, _):
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.words, env=self.environ, stdout=log, stderr=log
            )

    def exec_run(self, cmd, **_):
        words = [self._inside(word) for word in cmd]
        if words[0] == "mpbroker":  # a container sees no other brokers
            words += ["--data-dir", self.environ["STATE_DIRECTORY"]]
        done = subprocess.run(words, env=self.environ, capture_output=True)
        return SimpleExec(done.returncode, done.stdout)

    def logs(self, stdout=True, stderr=True):
        return b"" if not stdout else (self.folder / "log").read_bytes()

    def remove(self, **_):
        self.process.terminate()
        self.process.wait()

    def reload(self):
        self.status = "running" if self.process.poll() is None else "exited"

    def get_connection_mode(self):
        return core.ConnectionMode.docker_host

    def host(self):
        return "localhost"

    def port(self, _, port):
        assert port == self.port_inside
        return str(self.port_outside)


class SimpleExec(tuple):
    """docker's ExecResult: a pair with names."""

    def __new__(cls, exit_code, output):
        made = super().__new__(cls, (exit_code, output))
        made.exit_code, made.output = exit_code, output
        return made


@pytest.fixture
def engine(tmp_path, monkeypatch):
    made = Engine(tmp_path)
    monkeypatch.setattr(core, "DockerClient", lambda **_: made)
    monkeypatch.setattr(core.c, "ryuk_disabled", True)
    return made


def test_clients_reach_the_broker_at_the_port_that_the_engine_gave(engine):
    with MpbrokerContainer().with_setting("num.partitions", 3) as broker:
        bootstrap = broker.get_bootstrap_server()
        assert bootstrap == f"localhost:{engine.port_outside}"
        assert engine.port_inside == 9092 != engine.port_outside
        with Producer(bootstrap_servers=bootstrap) as producer:
            producer.send("events", b"value", partition=2).result()
        with Consumer(bootstrap_servers=bootstrap) as consumer:
            consumer.assign([("events", 2)])
            consumer.seek(("events", 2), 0)
            while not (found := consumer.poll(1000)):
                pass
        assert [each.value for each in found["events", 2]] == [b"value"]
        told = (engine.folder / "mpbroker-address").read_text()
        assert told == f"PLAINTEXT://{bootstrap}\n"
    assert engine.process.returncode == 0


def test_a_setting_is_spelled_so_that_the_broker_reads_it(engine):
    name = "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config"
    container = MpbrokerContainer().with_setting(name, "x")
    (setting,) = (
        each for each in settings_of_environment(container.env) if each.text == "x"
    )
    assert setting.name == name


def test_it_is_used_as_is_shown(engine):
    block = the_block(CLIENT, "python", "MpbrokerContainer")
    partitions = []

    def run_my_service(bootstrap):
        with Producer(bootstrap_servers=bootstrap) as producer:
            producer.send("events", b"value").result()
            partitions.append(producer.partitions_for("events"))

    exec(block, {"run_my_service": run_my_service})
    assert partitions == [3]


def test_a_broker_that_does_not_serve_is_told_with_its_log(engine):
    container = MpbrokerContainer().with_setting("num.io.threads", "four")
    with (
        pytest.raises(ContainerNotReadyError, match=r"num\.io\.threads=four"),
        container,
    ):
        pass


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker")
def test_in_a_real_container():
    if subprocess.run(
        ["docker", "image", "inspect", "mpbroker"], capture_output=True
    ).returncode:
        pytest.skip("no daemon of docker that has the image mpbroker")
    with (
        MpbrokerContainer() as broker,
        Producer(bootstrap_servers=broker.get_bootstrap_server()) as producer,
    ):
        assert producer.send("events", b"value").result().offset == 0
