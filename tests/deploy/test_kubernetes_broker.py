"""The manifests of a broker: they fit together, and what its pod runs serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from mpbroker import AdminClient
from mpbroker.config import BrokerConfig
from tests.support.children import wait_until
from tests.support.ports import reusable_port
from tests.support.unit_sandbox import settings_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
MANIFESTS = {
    each["kind"]: each
    for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/broker.yaml").read_text())
}
SET = MANIFESTS["StatefulSet"]["spec"]
POD = SET["template"]["spec"]
(BROKER,) = POD["containers"]
((FILE, PROPERTIES),) = MANIFESTS["ConfigMap"]["data"].items()


def environment(namespace="ours"):
    """Return the container's variables; Kubernetes puts $(NAME) into later ones."""
    found = {}
    for each in BROKER["env"]:
        value = each.get("value", namespace)
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda to: found[to[1]], value)
    return found


def test_each_manifest_is_of_a_kind_and_version_that_is_stable():
    assert {kind: each["apiVersion"] for kind, each in MANIFESTS.items()} == {
        "ConfigMap": "v1",
        "Service": "v1",
        "PodDisruptionBudget": "policy/v1",
        "StatefulSet": "apps/v1",
    }


def test_names_that_refer_to_each_other_exist():
    labels = SET["template"]["metadata"]["labels"]
    service = MANIFESTS["Service"]
    assert SET["serviceName"] == service["metadata"]["name"]
    assert SET["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    budget = MANIFESTS["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"] == labels
    ports = {each["name"]: each["containerPort"] for each in BROKER["ports"]}
    for each in service["spec"]["ports"]:
        assert ports[each["targetPort"]] == each["port"]
    assert BROKER["readinessProbe"]["httpGet"]["port"] in ports
    volumes = {each["name"] for each in POD["volumes"]}
    volumes |= {each["metadata"]["name"] for each in SET["volumeClaimTemplates"]}
    assert {each["name"] for each in BROKER["volumeMounts"]} == volumes
    (settings,) = (each for each in POD["volumes"] if "configMap" in each)
    name = MANIFESTS["ConfigMap"]["metadata"]["name"]
    assert settings["configMap"]["name"] == name


def test_one_broker_has_the_volume_and_no_eviction_takes_it_unasked():
    assert SET["replicas"] == 1
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 0
    (claim,) = SET["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    mounts = {each["name"]: each["mountPath"] for each in BROKER["volumeMounts"]}
    (state,) = re.findall(r"STATE_DIRECTORY=(\S+)", DOCKERFILE)
    (run_time,) = re.findall(r"RUNTIME_DIRECTORY=(\S+)", DOCKERFILE)
    # The root is read-only, and these are all that the broker writes.
    assert mounts[claim["metadata"]["name"]] == state
    assert run_time in mounts.values()


def test_the_image_s_user_is_the_pod_s_and_it_has_no_rights():
    (uid,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    assert POD["securityContext"]["runAsUser"] == int(uid)
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    assert BROKER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_stop_has_the_time_of_the_unit():
    (patience,) = settings_of(ROOT / "systemd/mpbroker.service")["TimeoutStopSec"]
    assert POD["terminationGracePeriodSeconds"] == int(patience)


def test_clients_are_told_the_service_on_the_port_that_it_has(tmp_path):
    path = tmp_path / FILE
    path.write_text(PROPERTIES)
    config = BrokerConfig.load({}, path, environment())
    (endpoint,) = config.endpoints
    assert endpoint.is_wildcard
    told = config.advertised[endpoint.listener_name]
    service = MANIFESTS["Service"]
    assert told.host == f"{service['metadata']['name']}.ours.svc"
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert (told.port, endpoint.port) == (ports["kafka"], ports["kafka"])
    assert config.metrics_listeners == (f"HTTP://0.0.0.0:{ports['metrics']}",)


def probe(kind, folder):
    """Run the command of a probe, told where the broker is; return its exit code."""
    program, *arguments = BROKER[kind]["exec"]["command"]
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments]
        + ["--data-dir", str(folder / "data"), "--timeout", "60"],
        capture_output=True,
        check=False,
    )
    return done.returncode


@pytest.fixture
def pod(tmp_path):
    """What the pod runs, with ports and directories of ours; yield where it serves."""
    metrics = reusable_port()
    settings = tmp_path / FILE
    settings.write_text(PROPERTIES.replace("0.0.0.0:9404", f"127.0.0.1:{metrics}"))
    mounted = f"/etc/mpbroker/{FILE}"
    assert mounted in BROKER["args"]
    arguments = [str(settings) if each == mounted else each for each in BROKER["args"]]
    environ = {
        "MPBROKER_LISTENERS": "PLAINTEXT://127.0.0.1:0",
        "STATE_DIRECTORY": str(tmp_path / "data"),
        "RUNTIME_DIRECTORY": str(tmp_path / "run"),
    }
    (tmp_path / "run").mkdir()
    # As on a new volume of ext4.
    (tmp_path / "data/lost+found").mkdir(parents=True)
    read_end, write_end = os.pipe()
    broker = subprocess.Popen(
        [sys.executable, "-m", "mpbroker", *arguments, f"--ready-fd={write_end}"],
        env={**os.environ, **environ},
        pass_fds=[write_end],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    try:
        with open(read_end) as ready:
            address = json.loads(ready.readline())["listeners"]["PLAINTEXT"]
        yield address, f"http://127.0.0.1:{metrics}"
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(120) == 0
    finally:
        broker.kill()
        broker.wait()
    assert probe("livenessProbe", tmp_path) != 0


def test_the_pod_s_command_serves_and_its_probes_say_so(pod, tmp_path):
    address, metrics = pod
    with AdminClient(bootstrap_servers=address) as admin:
        admin.create_topic("events")
        assert [each.name for each in admin.list_topics()] == ["events"]
    path = BROKER["readinessProbe"]["httpGet"]["path"]

    def is_ready():
        with urllib.request.urlopen(metrics + path, timeout=60) as answer:
            return answer.status == 200

    wait_until(is_ready)
    assert probe("startupProbe", tmp_path) == 0
    assert probe("livenessProbe", tmp_path) == 0
