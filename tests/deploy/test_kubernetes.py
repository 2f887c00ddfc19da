"""The manifests of a pipeline: they parse, fit together, and run what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.spark.pipeline import command
from mpbroker.spark.pipeline.description import parse
from tests.support.unit_sandbox import settings_of

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {
    each["kind"]: each
    for each in yaml.safe_load_all(
        (ROOT / "deploy/kubernetes/pipeline.yaml").read_text()
    )
}
PODS = {
    "Deployment": MANIFESTS["Deployment"]["spec"]["template"],
    "CronJob": MANIFESTS["CronJob"]["spec"]["jobTemplate"]["spec"]["template"],
}


@pytest.fixture(params=PODS)
def pod(request):
    return PODS[request.param]["spec"]


def test_each_manifest_is_of_a_kind_and_version_that_is_stable():
    assert {kind: each["apiVersion"] for kind, each in MANIFESTS.items()} == {
        "ConfigMap": "v1",
        "PersistentVolumeClaim": "v1",
        "Deployment": "apps/v1",
        "CronJob": "batch/v1",
    }


def test_the_file_is_a_pipeline_whose_paths_are_on_the_volume(pod):
    ((name, text),) = MANIFESTS["ConfigMap"]["data"].items()
    description = parse(tomllib.loads(text), Path(name).stem)
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert f"{mounts['files']}/{name}" in container["args"]
    assert description.table is not None and description.dead_letter is not None
    for path in (
        *(description.checkpoint, description.table.path),
        description.dead_letter.path,
    ):
        assert path.startswith(f"{mounts['lake']}/")


def test_names_that_refer_to_each_other_exist(pod):
    files, lake, tmp = pod["volumes"]
    assert files["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]
    claim = MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert lake["persistentVolumeClaim"]["claimName"] == claim
    assert tmp["emptyDir"] == {}
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    deployment = MANIFESTS["Deployment"]["spec"]
    labels = PODS["Deployment"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels


def test_the_command_line_is_one_that_the_program_understands(pod):
    (container,) = pod["containers"]
    group, name, *arguments = container["args"]
    assert group == "pipeline"
    context = command.commands[name].make_context(name, list(arguments))
    assert context.params["once"] == (pod is PODS["CronJob"]["spec"])
    assert context.params["master"] == "local[2]"


def test_never_two_run_at_once_and_a_stop_has_the_time_of_the_unit(pod):
    assert MANIFESTS["Deployment"]["spec"]["replicas"] == 1
    assert MANIFESTS["Deployment"]["spec"]["strategy"]["type"] == "Recreate"
    assert MANIFESTS["CronJob"]["spec"]["concurrencyPolicy"] == "Forbid"
    assert MANIFESTS["CronJob"]["spec"]["suspend"] is True
    (patience,) = settings_of(ROOT / "systemd/mpbroker-pipeline@.service")[
        "TimeoutStopSec"
    ]
    assert pod["terminationGracePeriodSeconds"] == int(patience)


def test_codes_that_another_try_cannot_help_fail_the_job():
    job = MANIFESTS["CronJob"]["spec"]["jobTemplate"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == {ExitCode.USAGE, ExitCode.CONFIG}
    # Kubernetes refuses the policy with another one.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_image_s_user_is_the_pod_s_and_it_has_no_rights(pod):
    made = (ROOT / "deploy/Dockerfile").read_text()
    (uid,) = re.findall(r"--uid (\d+)", made)
    assert pod["securityContext"]["runAsUser"] == int(uid)
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_the_deployment_and_the_job_have_the_same_pod_but_for_its_command():
    one, other = (PODS[kind]["spec"] for kind in ("Deployment", "CronJob"))
    assert {key for key in one | other if one.get(key) != other.get(key)} == {
        "containers",
        "restartPolicy",
    }
    (ours,), (theirs,) = one["containers"], other["containers"]
    assert {key for key in ours if ours[key] != theirs[key]} == {"args"}
