"""What deploy/ gives to Prometheus and Grafana: it parses, and asks for what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.supervisor.metrics.asking import METRICS, get
from tests.support.broker import Broker

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\bmpbroker_[a-z_]+")


def expressions():
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def promtool(*arguments):
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [found, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The names of all families there can be, whether they have samples or not."""
    with Broker(tmp_path_factory.mktemp("known") / "data", METRICS) as broker:
        text = get(broker)[1]
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    source = DEPLOY.parent / "mpbroker" / "supervisor" / "metrics"
    for file in source.glob("*.py"):
        names |= set(re.findall(r'"(mpbroker_[a-z_]+)"', file.read_text()))
    return names


def test_prometheus_takes_the_configuration_and_the_rules():
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_is_asked_for_exists(known, where, expression):
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", each) for each in NAME.findall(expression)
    }
    assert asked <= known


def test_every_query_of_the_dashboard_is_promql(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "1m")}
        for number, (_, expr) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_panels_do_not_lie_on_each_other():
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(
            panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"]
        )
        for y in range(
            panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"]
        )
    ]
    assert len(cells) == len(set(cells))
