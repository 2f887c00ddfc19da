"""What deploy/ gives to Prometheus and Grafana: it parses, and asks for what exists."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.exporter.asking import METRICS, get, url_of, wait_until
from tests.support.broker import Broker
from tests.support.fetch_clients import prometheus_tool
from tests.support.ports import reusable_port

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
    found = prometheus_tool("promtool")
    if found is None:
        pytest.skip("no promtool")
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
    source = DEPLOY.parent / "mpbroker" / "exporter"
    for file in source.glob("*.py"):
        names |= set(re.findall(r'"(mpbroker_[a-z_]+)"', file.read_text()))
    return names


def test_prometheus_takes_the_configuration_and_the_rules():
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


def test_prometheus_scrapes_a_broker_and_evaluates_every_rule(tmp_path):
    program = prometheus_tool("prometheus")
    if program is None:
        pytest.skip("no prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    config["global"] = dict.fromkeys(config["global"], "1s")
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for group in groups:
        group.pop("interval", None)
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump({"groups": groups}))
    address = f"127.0.0.1:{reusable_port()}"
    with Broker(tmp_path / "data", METRICS) as broker:
        job["static_configs"] = [{"targets": [urlsplit(url_of(broker)).netloc]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        serving = subprocess.Popen(
            [
                program,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address={address}",
                "--log.level=error",
            ]
        )

        def ask(path):
            with urllib.request.urlopen(f"http://{address}/api/v1/{path}") as answer:
                return json.load(answer)["data"]

        def evaluated():
            assert serving.poll() is None
            with suppress(urllib.error.URLError, ConnectionError):
                targets = ask("targets")["activeTargets"]
                rules = [r for group in ask("rules")["groups"] for r in group["rules"]]
                is_all = targets and all(
                    each["health"] != "unknown" for each in [*targets, *rules]
                )
                return (targets, rules) if is_all else None
            return None

        try:
            targets, rules = wait_until(evaluated)
            up = ask("query?query=mpbroker_info")["result"]
        finally:
            serving.terminate()
            serving.wait()
    assert [each["health"] for each in targets] == ["up"], targets
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert len(rules) == sum(len(group["rules"]) for group in groups)
    assert len(up) == 1


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_is_asked_for_exists(known, where, expression):
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", each) for each in NAME.findall(expression)
    }
    assert asked <= known


# What no panel and no alert asks for, since another metric says it, or says it better.
_NOT_ASKED_FOR = {
    "mpbroker_acceptor_blocked_ratio",  # blocked_seconds_total
    "mpbroker_classic_groups",
    "mpbroker_connections",  # client_connections
    "mpbroker_consumer_groups",
    "mpbroker_fetched_bytes_total",  # by topic
    "mpbroker_group_committed_offset",  # lag
    "mpbroker_group_offsets_not_shown",
    "mpbroker_groups",
    "mpbroker_handler_idle_seconds_total",  # idle_ratio
    "mpbroker_info",  # the list of brokers is made of it
    "mpbroker_log_start_offset",
    "mpbroker_parked_requests",  # purgatory_size
    "mpbroker_partitions_not_shown",
    "mpbroker_partitions_unloaded",
    "mpbroker_phase",
    "mpbroker_process_restarts",  # process_deaths_total
    "mpbroker_process_starts_total",
    "mpbroker_processor_idle_seconds_total",  # idle_ratio
    "mpbroker_produced_bytes_total",  # by topic
    "mpbroker_quota_clients_refused_total",
    "mpbroker_quota_time_ratio",
    "mpbroker_reauthentication_max_seconds",
    "mpbroker_reauthentication_seconds",
    "mpbroker_remote_copied_segments_total",  # copied_bytes
    "mpbroker_remote_fetched_chunks_total",  # fetched_bytes
    "mpbroker_remote_stored_segments",  # stored_bytes
    "mpbroker_request_bytes_total",  # received_bytes_total
    "mpbroker_requests_by_version_total",
    "mpbroker_requests_executed_total",
    "mpbroker_response_bytes_total",
    "mpbroker_share_acknowledgements_total",
    "mpbroker_share_groups",
    "mpbroker_share_lock_timeouts_total",
    "mpbroker_share_sessions",
    "mpbroker_start_time_seconds",
    "mpbroker_streams_groups",
    "mpbroker_throttle_seconds_total",
    "mpbroker_topic_partitions",
}


def test_what_there_is_is_asked_for_or_left_out_on_purpose(known):
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, expression in expressions()
        for name in NAME.findall(expression)
    }
    ours = {name for name in known if name.startswith("mpbroker_")}
    assert ours - asked == _NOT_ASKED_FOR


def test_every_query_of_the_dashboard_is_promql(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "1m")}
        for number, (_, expr) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", str(file))


PUSHES = "mpbroker_otlp_pushes_total"
EMPTY = 'mpbroker_processor_empty_polls_total{instance="a",processor="0"}'
REMOTE_LAG = 'mpbroker_remote_lag_segments{instance="a"}'
REMOTE_ERRORS = 'mpbroker_remote_{}_errors_total{{instance="a"}}'
ENDED = "mpbroker_authentications_total"
LEASE = 'mpbroker_cluster_lease_seconds{instance="a"}'
SHARED_LAG = 'mpbroker_cluster_lag_records{instance="a"}'
CALLS = 'mpbroker_cluster_{}_errors_total{{instance="a"}}'


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        # By minutes: what it begins with, and how much more it is each time.
        ("MpbrokerMetricsNotPushed", {PUSHES + '{result="failed"}': "0+1x30"}, True),
        ("MpbrokerRemoteCopyLagGrows", {REMOTE_LAG: "1+1x30"}, True),
        ("MpbrokerRemoteCopyLagGrows", {REMOTE_LAG: "9-1x8 1x20"}, False),
        (
            "MpbrokerRemoteStoreErrors",
            {
                REMOTE_ERRORS.format("copy"): "0+1x30",
                REMOTE_ERRORS.format("fetch"): "0x30",
            },
            True,
        ),
        (
            "MpbrokerRemoteStoreErrors",
            {
                REMOTE_ERRORS.format("copy"): "4x30",
                REMOTE_ERRORS.format("fetch"): "0x30",
            },
            False,
        ),
        (
            "MpbrokerMetricsNotPushed",
            {
                PUSHES + '{result="failed"}': "0+1x30",
                PUSHES + '{result="taken"}': "5+0x30",
            },
            True,
        ),
        (
            "MpbrokerMetricsNotPushed",
            {
                PUSHES + '{result="failed"}': "0+1x30",
                PUSHES + '{result="taken"}': "0+1x30",
            },
            False,
        ),
        ("MpbrokerClusterLeaseLost", {LEASE: "4x10 0x20"}, True),
        ("MpbrokerClusterLeaseLost", {LEASE: "4x30"}, False),
        ("MpbrokerClusterCopyLagGrows", {SHARED_LAG: "1+1x30"}, True),
        ("MpbrokerClusterCopyLagGrows", {SHARED_LAG: "9-1x8 0x20"}, False),
        (
            "MpbrokerClusterCallsFail",
            {CALLS.format("store"): "0x30", CALLS.format("database"): "0+1x30"},
            True,
        ),
        (
            "MpbrokerClusterCallsFail",
            {CALLS.format("store"): "4x30", CALLS.format("database"): "7x30"},
            False,
        ),
        ("MpbrokerPollsForNothing", {EMPTY: "0+60000x30"}, True),
        ("MpbrokerPollsForNothing", {EMPTY: "0+60x30"}, False),
        (
            "MpbrokerAuthenticationsFail",
            {ENDED + '{result="credentials"}': "0+600x30"},
            True,
        ),
        (
            "MpbrokerAuthenticationsFail",
            {ENDED + '{result="handshake"}': "0+600x30"},
            False,
        ),
    ],
)
def test_an_alert_fires_when_it_should_and_only_then(tmp_path, alert, series, fires):
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    test = {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "25m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }
    file = tmp_path / "test.yml"
    rules = [str(DEPLOY / "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [test]}))
    promtool("test", "rules", str(file))


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
