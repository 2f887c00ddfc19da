"""`mpbroker cluster` with a real database."""

from __future__ import annotations

import json

import pytest

from mpbroker.metadata.meta_properties import MetaProperties, write_meta_properties
from tests.cluster.conftest import empty_url, execute, shared_server

__all__ = ["empty_url", "shared_server"]


def test_a_cluster_takes_the_id_of_the_broker_that_begins_it(
    mpbroker, empty_url, tmp_path
):
    arguments = ["--database", empty_url, "--storage", "s3://bucket"]
    begin = ["cluster", "init", *arguments, "--from-broker", str(tmp_path)]
    refused = mpbroker(*begin)
    assert refused.code == 2 and "has no meta.properties" in refused.err
    write_meta_properties(str(tmp_path), MetaProperties("its-own", 1, ""))
    for _ in range(2):
        assert "Cluster its-own is ready" in mpbroker(*begin).out.decode()


def test_a_cluster_is_made_once_and_migrated_any_number_of_times(mpbroker, empty_url):
    arguments = ("--database", empty_url, "--format", "json")
    made = mpbroker("cluster", "init", *arguments, "--storage", "s3://bucket/some/")
    assert made.code == 0, made.err
    told = json.loads(made.out)
    assert told["storage"] == "s3://bucket/some"
    again = mpbroker("cluster", "init", *arguments, "--storage", "s3://bucket/some/")
    assert again.code == 1
    assert told["cluster"] in again.err and again.err.count("\n") == 1
    migrated = mpbroker("cluster", "migrate", *arguments)
    assert (migrated.code, json.loads(migrated.out)) == (0, {"applied": []})


def test_the_url_of_the_database_may_be_in_the_environment(
    mpbroker, empty_url, monkeypatch
):
    monkeypatch.setenv("MPBROKER_CLUSTER_DATABASE_URL", empty_url)
    found = mpbroker("cluster", "migrate")
    assert found.code == 1 and "run 'mpbroker cluster init'" in found.err


def test_a_database_that_is_away_has_an_exit_code_of_its_own(mpbroker, tmp_path):
    url = f"postgresql://admin@/any?host={tmp_path}"
    found = mpbroker("cluster", "migrate", "--database", url, "--timeout", "0.2")
    assert found.code == 69
    assert "gave no answer in 0.2 s" in found.err


@pytest.mark.parametrize("url", ["bucket", "s3://", "http://bucket"])
def test_a_store_that_is_no_url_of_one_is_refused(mpbroker, url):
    found = mpbroker("cluster", "init", "--database", "x", "--storage", url)
    assert found.code == 2 and "is no URL of a store" in found.err


def test_status_tells_the_nodes_and_how_safe_commits_are(mpbroker, empty_url):
    arguments = ("--database", empty_url)
    mpbroker("cluster", "init", *arguments, "--storage", "s3://bucket")
    assert (
        "No node has joined yet."
        in mpbroker("cluster", "status", *arguments).out.decode()
    )
    for node, lease in (("7", "1 hour"), ("NULL", "0 s")):
        execute(
            empty_url,
            f"SELECT mpbroker.join_node_v1(gen_random_uuid(), {node}, 'r1',"
            f" '{{SSL://here:9093}}', '1.0', '{lease}')",
        )
    told = json.loads(mpbroker("cluster", "status", *arguments, "--format", "json").out)
    live, gone = told["nodes"]
    assert (live["id"], live["is_live"], live["rack"]) == (7, True, "r1")
    assert (gone["id"], gone["is_live"]) == (1001, False)
    assert told["synchronous_standby"] is False
    assert len(told["warnings"]) == 2  # no standby; the server of tests has no fsync
    lines = mpbroker("cluster", "status", *arguments).out.decode().splitlines()
    assert lines[-2].split() == ["7", "live", "1", "r1", "0", "1.0", "SSL://here:9093"]


def test_status_of_an_old_schema_says_so(mpbroker, empty_url):
    mpbroker("cluster", "init", "--database", empty_url, "--storage", "s3://bucket")
    execute(empty_url, "DROP FUNCTION mpbroker.nodes_v1")
    execute(empty_url, "DELETE FROM mpbroker.migration WHERE version > 1")
    told = mpbroker("cluster", "status", "--database", empty_url)
    assert told.code == 0
    assert "the schema is old: run 'mpbroker cluster migrate'" in told.out.decode()
