"""Apache Kafka's tools for the quorum and the brokers, and what each of them shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.compat.adapters import ADAPTERS
from tests.compat.test_java_tools import TOOLS, Tool, run_java, tool
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_tools

__all__ = ["tool"]  # a fixture

pytestmark = [
    pytest.mark.skipif(
        not have_java_tools(),
        reason="no Apache Kafka in .downloads/java: scripts/test fetches it with Maven",
    ),
]

QUORUM = f"{TOOLS}.MetadataQuorumCommand"
FEATURES = f"{TOOLS}.FeatureCommand"


def test_the_quorum_is_described(tool: Tool) -> None:
    said = tool(QUORUM, "describe", "--status")
    status = dict(re.findall(r"(?m)^(\w+): +(.*?)\s*$", said))
    assert status["LeaderId"] == "1"
    assert status["MaxFollowerLag"] == "0"
    assert int(status["HighWatermark"]) > 0
    assert re.match(r'\[\{"id": 1.*\}\]$', status["CurrentVoters"])
    assert status["CurrentObservers"] == "[]"
    (row,) = tool(QUORUM, "describe", "--replication").splitlines()[1:]
    node, _, end, lag, *_, state = row.split()
    assert (node, lag, state) == ("1", "0", "Leader")
    assert int(end) >= int(status["HighWatermark"])


def test_a_voter_that_is_unknown_is_not_removed(tool: Tool) -> None:
    voter = ("--controller-id", "9", "--controller-directory-id", "A" * 21 + "Q")
    with pytest.raises(AssertionError, match=r"UnsupportedVersion|VoterNotFound"):
        tool(QUORUM, "remove-controller", *voter)


def test_a_broker_that_is_unknown_is_not_unregistered(bootstrap: str) -> None:
    cluster = f"{TOOLS}.ClusterTool"  # takes its address after the subcommand only
    with pytest.raises(AssertionError, match="Broker ID 9 is not currently registered"):
        run_java(cluster, "unregister", "--bootstrap-server", bootstrap, "--id", "9")


def features(tool: Tool) -> dict[str, tuple[str, str, str]]:
    """Return the oldest, the newest and the finalized level of each feature."""
    row = r"Feature: (\S+)\s+SupportedMinVersion: (\S+)\s+SupportedMaxVersion: (\S+)"
    return {
        name: (oldest, newest, level)
        for name, oldest, newest, level in re.findall(
            row + r"\s+FinalizedVersionLevel: (\S+)", tool(FEATURES, "describe")
        )
    }


def test_features_are_described_downgraded_and_upgraded(tool: Tool) -> None:
    before = features(tool)
    assert {name: row[:2] for name, row in before.items()} == {
        "eligible.leader.replicas.version": ("0", "1"),
        "group.version": ("0", "1"),
        "kraft.version": ("0", "1"),
        "metadata.version": ("3.3-IV3", "4.4-IV2"),
        "share.version": ("0", "1"),
        "streams.version": ("0", "1"),
        "transaction.version": ("0", "2"),
    }
    name = "eligible.leader.replicas.version"
    levels = ["1", "0"] if before[name][2] == "0" else ["0", "1"]
    for level in levels:
        change = "upgrade" if level == "1" else "downgrade"
        said = tool(FEATURES, change, "--feature", f"{name}={level}")
        assert f"{name} was {change}d to {level}." in said
        wait_until(lambda level=level: features(tool)[name][2] == level)
    said = tool(FEATURES, "downgrade", "--dry-run", "--feature", "share.version=0")
    assert "share.version can be downgraded to 0." in said
    for change, reason in (
        ("share.version=9", "Invalid update version 9 for feature share.version"),
        ("nope.version=1", "does not support this feature"),
    ):
        with pytest.raises(AssertionError, match=reason):
            tool(FEATURES, "upgrade", "--feature", change)
    assert features(tool) == before


def test_partitions_are_reassigned_to_the_only_broker(
    tool: Tool, bootstrap: str, topic_name: str, tmp_path: Path
) -> None:
    reassign = f"{TOOLS}.reassign.ReassignPartitionsCommand"
    with ADAPTERS["kafka-python"](bootstrap) as admin:
        admin.create_topic(topic_name, 2)
        wait_until(lambda: admin.topics().get(topic_name) == 2)
        plan = tmp_path / "plan.json"
        rows = [
            {"topic": topic_name, "partition": index, "replicas": [1]}
            for index in (0, 1)
        ]
        plan.write_text(json.dumps({"version": 1, "partitions": rows}))
        this = ("--reassignment-json-file", str(plan))
        said = tool(reassign, "--execute", *this)
        assert "Successfully started partition reassignments" in said
        said = tool(reassign, "--verify", *this)
        assert f"Reassignment of partition {topic_name}-1 is completed." in said
        said = tool(reassign, "--list")
        assert "No partition reassignments found." in said
        admin.delete_topic(topic_name)
