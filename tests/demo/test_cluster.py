"""The demonstration of a cluster, in short."""

from __future__ import annotations

import pytest

from mpbroker.testing.postgresql import programs
from tests.demo import cluster
from tests.support.object_store import server


def ask(tmp_path):
    return cluster.main(["--seconds", "3", "--out", str(tmp_path)])


@pytest.mark.skipif(
    programs() is None or server() is None, reason="no PostgreSQL, or no SeaweedFS"
)
def test_records_of_three_nodes_are_there_once_though_one_dies(tmp_path, capsys):
    assert ask(tmp_path) == 0
    assert "each acknowledged once and read once, in order" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "latency.svg").read_text()


def test_what_is_missing_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cluster, "programs", lambda: None)
    assert ask(tmp_path) == 2
    assert "needs PostgreSQL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found[1].pop(0),  # lost
        lambda found: found[1].update({1: 1}),  # doubled
        lambda found: found[1].update({0: 2}),  # another record
    ],
    ids=["lost", "doubled", "another"],
)
def test_a_broken_promise_is_found(change):
    writer, reader = cluster.Writer("127.0.0.1:1"), cluster.Reader("127.0.0.1:1")
    writer.sent = {1: cluster.Sent(1, 0, 0.0, 0.1)}
    writer.count = 1
    reader.found[1] = {0: 1}
    cluster.check(writer, reader)
    change(reader.found)
    with pytest.raises(cluster.DemoFailedError):
        cluster.check(writer, reader)
