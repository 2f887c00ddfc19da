"""What describes a container, read as strictly as can be without running one."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from mpbroker.cli import main
from mpbroker.config import BrokerConfig
from tests.support.unit_sandbox import settings_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
JSON_FORM = {"CMD", "ENTRYPOINT", "VOLUME"}
KNOWN = JSON_FORM | {
    *("ARG", "COPY", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL"),
    *("USER", "WORKDIR"),
}


class Instruction(NamedTuple):
    name: str
    text: str


def read_dockerfile(path):
    """Instructions, with lines that are continued put together.

    Source: "Dockerfile reference", Format.
    """
    instructions = []
    lines = [x for x in path.read_text().splitlines() if x.strip()]
    lines = [x for x in lines if not x.lstrip().startswith("#")]
    while lines:
        line = lines.pop(0)
        while line.endswith("\\"):
            line = line[:-1] + lines.pop(0)
        name, _, text = line.partition(" ")
        instructions.append(Instruction(name, text.strip()))
    return instructions


INSTRUCTIONS = read_dockerfile(DEPLOY / "Dockerfile")
PIPELINE = read_dockerfile(DEPLOY / "Dockerfile.pipeline")


def texts(name, instructions=INSTRUCTIONS):
    return [each.text for each in instructions if each.name == name]


def last_stage():
    starts = [n for n, each in enumerate(INSTRUCTIONS) if each.name == "FROM"]
    return INSTRUCTIONS[starts[-1] :]


def environment():
    pairs = [pair for text in texts("ENV", last_stage()) for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)


def is_sent(path):
    """Whether the build sees a file: the last pattern that matches it decides."""
    sent = True
    parts = Path(path).parts
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#"):
            names = [*heads, parts[-1]] if "**/" in line else heads
            if any(fnmatch(name, pattern) for name in names):
                sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("instructions", [INSTRUCTIONS, PIPELINE])
def test_every_instruction_is_one_and_well_formed(instructions):
    assert {each.name for each in instructions} <= KNOWN
    assert instructions[0].name == "ARG" and instructions[1].name == "FROM"
    for each in instructions:
        assert each.text, each
        if each.name in JSON_FORM:
            assert all(isinstance(word, str) for word in json.loads(each.text))


@pytest.mark.parametrize("text", texts("RUN") + texts("RUN", PIPELINE))
def test_every_run_line_is_a_shell_command(text):
    done = subprocess.run(["sh", "-n", "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_copied_is_there_and_sent_to_the_build():
    copied = []
    for text in texts("COPY"):
        words = shlex.split(text)
        if words[0].startswith("--from="):
            stages = re.findall(r"AS (\S+)", "\n".join(texts("FROM")))
            assert words[0].removeprefix("--from=") in stages
            continue
        copied += words[:-1]
    assert {"mpbroker", "pyproject.toml", "setup.py"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists() and is_sent(name)
    assert is_sent("mpbroker/cli/serve.py")
    for kept_back in (
        ".git/HEAD",
        "tests/conftest.py",
        "mpbroker/native/_core.abi3.so",
    ):
        assert not is_sent(kept_back)


def test_no_image_is_made_without_the_compiled_core():
    (installs,) = (text for text in texts("RUN") if " install --no-cache-dir" in text)
    assert "MPBROKER_CORE=required" in installs


def test_the_broker_runs_as_nobody_special_and_where_it_may_write():
    stage = last_stage()
    (user,) = texts("USER", stage)
    assert user not in ("root", "0")
    (made,) = texts("RUN", stage)
    assert re.search(rf"useradd .*\b{user}\b", made, re.S)
    environ = environment()
    assert environ["STATE_DIRECTORY"] in made
    assert texts("VOLUME", stage) == [json.dumps([environ["STATE_DIRECTORY"]])]


def test_any_user_of_group_0_may_write_where_the_broker_does():
    """Whoever gives users out gives them that group, and no other.

    Source: OpenShift, "Creating images", Support arbitrary user ids.
    """
    environ = environment()
    (made,) = texts("RUN", last_stage())
    (line,) = [each for each in made.split("&&") if "install -d" in each]
    words = shlex.split(line)
    group, mode = (words[words.index(option) + 1] for option in ("-g", "-m"))
    assert (group, int(mode, 8) & 0o077) == ("0", 0o070)
    assert environ["STATE_DIRECTORY"] == words[-1]
    assert environ["RUNTIME_DIRECTORY"] == "/tmp"


def test_clients_of_the_commands_that_are_shown_are_told_what_they_can_reach():
    comments = (DEPLOY / "Dockerfile").read_text().replace("\\\n#", "")
    (command,) = re.findall(r"^# +docker run (.+)$", comments, re.M)
    words = shlex.split(command)
    given = dict(words[n + 1].split("=", 1) for n, x in enumerate(words) if x == "-e")
    config = BrokerConfig.load({}, None, environment() | given)
    (endpoint,) = config.endpoints
    told = config.advertised[endpoint.listener_name]
    published = words[words.index("-p") + 1].rsplit(":", 2)[-2:]
    assert told.host == "localhost"
    assert published == [str(told.port), str(endpoint.port)]


def test_the_image_serves_every_address_on_the_port_that_it_exposes():
    config = BrokerConfig.load({}, None, environment())
    (endpoint,) = config.endpoints
    assert endpoint.is_wildcard
    assert texts("EXPOSE") == [str(endpoint.port)]
    assert config.log_dirs == (environment()["STATE_DIRECTORY"],)


def test_the_commands_in_the_image_exist(capsys):
    entry = [json.loads(text) for text in texts("ENTRYPOINT") + texts("CMD")]
    assert entry == [["mpbroker"], ["serve"]]
    (check,) = texts("HEALTHCHECK")
    program, *arguments = json.loads(check.partition("CMD")[2])
    assert program == "mpbroker" and "--quiet" in arguments
    assert main([*arguments, "--help"]) == 0
    assert "--quiet" in capsys.readouterr().out


def environment_here(folder):
    """The image's, with directories of ours for its own, and any port of loopback."""
    environ = environment()
    del environ["PATH"]
    for name, here in (("STATE_DIRECTORY", "data"), ("RUNTIME_DIRECTORY", "run")):
        (folder / here).mkdir()
        environ[name] = str(folder / here)
    environ["MPBROKER_LISTENERS"] = re.sub(
        r"//0\.0\.0\.0:\d+$", "//127.0.0.1:0", environ["MPBROKER_LISTENERS"]
    )
    return environ


def health(environ):
    """Run what HEALTHCHECK runs; return its exit code.

    A container has one broker; here there may be others, so it is told where to look.
    """
    (check,) = texts("HEALTHCHECK")
    program, *arguments = json.loads(check.partition("CMD")[2])
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments, "--timeout", "60"]
        + ["--data-dir", environ["STATE_DIRECTORY"]],
        env={**os.environ, **environ},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode


def test_what_the_image_runs_serves_is_healthy_and_stops_when_told(tmp_path):
    """Its entry point, environment, health check and stop signal, without the image."""
    environ = environment_here(tmp_path)
    assert health(environ) != 0
    entry = [json.loads(text)[0] for text in texts("ENTRYPOINT") + texts("CMD")]
    read_end, write_end = os.pipe()
    broker = subprocess.Popen(
        [sys.executable, "-m", *entry, f"--ready-fd={write_end}"],
        env={**os.environ, **environ},
        cwd=environ["STATE_DIRECTORY"],
        pass_fds=[write_end],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    try:
        with open(read_end) as ready:
            started = json.loads(ready.readline())
        assert started["data_dir"] == environ["STATE_DIRECTORY"]
        assert list(Path(environ["RUNTIME_DIRECTORY"]).iterdir())  # the control socket
        assert health(environ) == 0
        (number,) = texts("STOPSIGNAL")
        broker.send_signal(signal.Signals[number])
        assert broker.wait(120) == 0
    finally:
        broker.kill()
        broker.wait()
    assert health(environ) != 0


def test_the_image_of_pipelines_adds_to_the_broker_s_and_keeps_its_user(capsys):
    comments = (DEPLOY / "Dockerfile").read_text()
    (broker,) = re.findall(r"docker build -f deploy/Dockerfile -t (\S+) \.", comments)
    assert texts("ARG", PIPELINE) == [f"BROKER={broker}"]
    assert texts("FROM", PIPELINE) == ["${BROKER}"]
    # Nothing of the checkout: the broker's image has it, with its compiled parts.
    assert not texts("COPY", PIPELINE)
    assert texts("USER", PIPELINE)[-1] == texts("USER", last_stage())[-1]
    assert texts("HEALTHCHECK", PIPELINE) == ["NONE"]  # the broker's asks a broker
    (command,) = map(json.loads, texts("CMD", PIPELINE))
    assert main(command) == 0
    assert "Run pipelines that a TOML file describes" in capsys.readouterr().out


def test_the_image_of_pipelines_has_extras_that_exist_and_a_place_for_tables():
    runs = " ".join(texts("RUN", PIPELINE))
    ((name, extras),) = re.findall(r"'(mpbroker-server)\[(.+?)\]'", runs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name == project["name"]
    assert {"spark", *extras.split(",")} <= set(project["optional-dependencies"])
    (line,) = [each for each in runs.split("&&") if "install -d" in each]
    (lake,) = json.loads(texts("VOLUME", PIPELINE)[0])
    assert f"-o {texts('USER', PIPELINE)[-1]} -g 0 -m 0770 {lake}" in line
    manifests = (DEPLOY / "kubernetes" / "pipeline.yaml").read_text()
    assert f"mountPath: {lake}}}" in manifests


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_builds_this_and_keeps_the_data():
    (broker,) = COMPOSE["services"].values()
    context = DEPLOY / broker["build"]["context"]
    assert context.resolve() == ROOT
    assert (context / broker["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    volumes = dict(each.split(":", 1) for each in broker["volumes"])
    assert volumes["data"] == environment()["STATE_DIRECTORY"]
    assert set(volumes) == set(COMPOSE["volumes"])
    # The root is read-only: what the broker writes beside its data is in memory.
    assert broker["read_only"] is True
    assert any(
        each.startswith(environment()["RUNTIME_DIRECTORY"]) for each in broker["tmpfs"]
    )


def test_compose_mounts_memory_as_every_engine_does():
    """With uid= Podman refuses it, and below /run its user may not write.

    Source: podman-run(1), --tmpfs.
    """
    (broker,) = COMPOSE["services"].values()
    assert broker["tmpfs"] == ["/tmp"]


def test_compose_says_nothing_that_compose_does_not_know():
    """Source: the Compose specification, top level and services."""
    assert set(COMPOSE) <= {"name", "services", "volumes", "networks"}
    for broker in COMPOSE["services"].values():
        assert set(broker) <= {
            *("image", "build", "environment", "ports", "volumes", "read_only"),
            *("tmpfs", "cap_drop", "security_opt", "ulimits", "stop_grace_period"),
            *("restart", "command", "healthcheck", "depends_on", "networks"),
        }
        assert set(broker["build"]) <= {"context", "dockerfile", "args", "target"}
        assert re.fullmatch(
            r"no|always|unless-stopped|on-failure(:\d+)?", broker["restart"]
        )
        assert re.fullmatch(r"(\d+(h|m|s|ms))+", broker["stop_grace_period"])
        assert all(type(each) is str for each in broker["environment"].values())


def test_compose_waits_for_the_end_as_long_as_the_broker_may_take():
    (broker,) = COMPOSE["services"].values()
    grace = int(broker["stop_grace_period"].removesuffix("s"))
    (stop,) = settings_of(ROOT / "systemd" / "mpbroker.service")["TimeoutStopSec"]
    assert grace >= int(stop.removesuffix("s"))


def test_compose_tells_every_client_an_address_that_it_can_reach():
    (broker,) = COMPOSE["services"].values()
    config = BrokerConfig.load({}, None, environment() | broker["environment"])
    assert all(endpoint.is_wildcard for endpoint in config.endpoints)
    host, inside = (config.advertised[each.listener_name] for each in config.endpoints)
    published = [each.rsplit(":", 2)[-2:] for each in broker["ports"]]
    assert host.host == "localhost" and [str(host.port)] * 2 in published
    assert inside.host in COMPOSE["services"]


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker")
def test_docker_reads_the_compose_file():
    version = subprocess.run(["docker", "compose", "version"], capture_output=True)
    if version.returncode:
        pytest.skip("no docker compose")
    done = subprocess.run(
        ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
