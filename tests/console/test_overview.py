"""The overview: who may see it, its figures, deaths, and what outlives the exporter."""

from __future__ import annotations

import os
import signal

import pytest

from mpbroker import AdminClient, Producer
from tests.console.serving import browser, secured
from tests.exporter.asking import pids_of
from tests.support.children import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("overview")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights")
        yield made


@pytest.fixture(scope="module")
def admin(broker):
    return browser(broker, "admin")


def overview(admin):
    """The first overview that has rates."""

    def ready():
        found = admin.get("overview").json["overview"]
        return found if found and found["verdict"] else None

    return wait_until(ready)


def test_it_is_for_users_who_may_describe_the_cluster(broker):
    alice = browser(broker, "alice")
    for path in ("overview", "history"):
        refused = alice.get(path)
        assert refused.status == 403
        assert "CLUSTER_AUTHORIZATION_FAILED" in refused.text
        assert browser(broker).get(path).status == 401


def test_requests_of_clients_are_counted_where_they_pass(broker, admin):
    with Producer(bootstrap_servers=broker.bootstrap) as producer:

        def counted():
            # Again and again: what came before the first look is in no rate.
            for _ in range(20):
                producer.send("flights", b"x" * 1000).result(60)
            found = overview(admin)
            rows = {each["api"]: each for each in found["apis"]}
            return rows.get("Produce")

        row = wait_until(counted)
    assert row["rate"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["work_p99_ms"] <= row["p99_ms"] * 2  # buckets double


def test_what_is_not_known_is_none(admin):
    rows = {(each["role"], each["id"]): each for each in overview(admin)["processes"]}
    assert rows["acceptor", 0]["busy"] is None
    assert rows["acceptor", 0]["connections"] is None
    assert rows["handler", 0]["parked"] is not None
    first = admin.get("history").json["columns"]
    assert first["requests"][0] is None  # there was no look before
    assert first["connections"][0] is not None


def test_a_death_is_shown_with_its_repair(broker, admin):
    overview(admin)
    os.kill(pids_of(broker, "processor")[0], signal.SIGKILL)

    steps = ("died: signal 9", "was repaired", "started again", "serves again")

    def told():
        events = overview(admin)["events"][::-1]  # the newest comes first
        return [each["text"] for each in events if each["role"] == "processor"]

    wait_until(lambda: told() and told()[-1].startswith(steps[-1]))
    for text, step in zip(told()[-4:], steps, strict=True):
        assert text.startswith(step)
    assert overview(admin)["deaths"] >= 1


def test_the_history_outlives_the_exporter(broker, admin):
    before = wait_until(lambda: admin.get("history").json["columns"]["at"])
    (pid,) = pids_of(broker, "exporter")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pids_of(broker, "exporter") not in ([pid], [0]))
    after = wait_until(
        lambda: (
            found
            if len(found := admin.get("history").json["columns"]["at"]) > len(before)
            else None
        )
    )
    assert after[: len(before)] == before
    last = int(after[-1])
    later = admin.get("history", after=last).json["columns"]["at"]
    assert later == [each for each in after if each > last]
