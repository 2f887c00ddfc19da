"""Apache Kafka's tools move a partition between log directories, of Kafka and of us."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.adapters import ADAPTERS
from tests.compat.records import some_records
from tests.compat.test_java_tools import TOOLS, run_java
from tests.support.apache_kafka import ApacheKafka
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_tools

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
    pytest.mark.timeout(600),
]

REASSIGN = f"{TOOLS}.reassign.ReassignPartitionsCommand"


@pytest.fixture(params=["mpbroker", "apache kafka"])
def bootstrap_of_two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A broker with the log directories `data` and `other`."""
    paths = f"{tmp_path}/data,{tmp_path}/other"
    if request.param == "mpbroker":
        with Broker(tmp_path / "data", {"log.dirs": paths, "node.id": 1}) as ours:
            yield ours.bootstrap
    else:
        both = f"log.dirs={paths}\n"
        with ApacheKafka(tmp_path / "data", heap="400m", properties=both) as theirs:
            yield theirs.bootstrap


def tool(bootstrap: str, *arguments: str) -> str:
    return run_java(arguments[0], "--bootstrap-server", bootstrap, *arguments[1:])


def directories(bootstrap: str, topic: str) -> dict[str, list[dict[str, object]]]:
    """The topic's partitions by the name of the log directory, as kafka-log-dirs says.

    Without sizes.
    """
    said = tool(bootstrap, f"{TOOLS}.LogDirsCommand", "--describe")
    (broker,) = json.loads(said.splitlines()[-1])["brokers"]
    return {
        Path(each["logDir"]).name: [
            {name: row[name] for name in ("partition", "offsetLag", "isFuture")}
            for row in each["partitions"]
            if row["partition"].startswith(f"{topic}-")
        ]
        for each in broker["logDirs"]
        if each["error"] is None
    }


def plan_of(path: Path, topic: str, where: str) -> tuple[str, str]:
    row = {"topic": topic, "partition": 0, "replicas": [1], "log_dirs": [where]}
    path.write_text(json.dumps({"version": 1, "partitions": [row]}))
    return "--reassignment-json-file", str(path)


def test_kafkas_tools_move_a_partition(
    bootstrap_of_two: str, topic_name: str, tmp_path: Path
) -> None:
    bootstrap, plan = bootstrap_of_two, tmp_path / "plan.json"
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.create_topic(topic_name, 1)
        wait_until(lambda: client.topics().get(topic_name) == 1)
        client.produce(topic_name, some_records(200))
    (here,) = tmp_path.glob(f"*/{topic_name}-0")
    there = tmp_path / ("other" if here.parent.name == "data" else "data")
    this = plan_of(plan, topic_name, str(there))
    said = tool(bootstrap, REASSIGN, "--execute", *this)
    started = f"Successfully started moving log directory to {there} for replica"
    assert f"{started} {topic_name}-0 with broker 1" in said
    while "is still in progress" in (
        said := tool(bootstrap, REASSIGN, "--verify", *this)
    ):
        pass
    assert re.search(
        rf"Reassignment of replica {topic_name}-0-1 completed successfully", said
    )
    row = {"partition": f"{topic_name}-0", "offsetLag": 0, "isFuture": False}
    assert directories(bootstrap, topic_name) == {
        there.name: [row],
        here.parent.name: [],
    }
    assert (there / f"{topic_name}-0").is_dir()
    assert not here.exists()
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        assert client.offsets(topic_name, 0) == (0, 200)
        client.produce(topic_name, some_records(5))
        assert client.offsets(topic_name, 0) == (0, 205)
    this = plan_of(plan, topic_name, str(tmp_path / "nowhere"))
    with pytest.raises(AssertionError, match="LogDirNotFoundException"):
        tool(bootstrap, REASSIGN, "--execute", *this, "--timeout", "1000")
