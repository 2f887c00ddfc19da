"""Transactions, producers and log directories in the console; ends of transactions."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from mpbroker import AdminClient, Producer
from mpbroker.base.errors import MpbrokerError
from tests.console.serving import browser, secured


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("transactions")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights", partitions=2)
        yield made


@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


@pytest.fixture
def alice(broker):
    return browser(broker, "alice")


@contextmanager
def opened(broker, name):
    """A producer with an open transaction that has a record in flights-1."""
    producer = Producer(bootstrap_servers=broker.bootstrap, transactional_id=name)
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("flights", b"v", partition=1).result(60)
        yield producer
    finally:
        producer.close(0)


def transaction(admin, name):
    rows = admin.get("transactions", match=name, fresh=1).json["rows"]
    return next(row for row in rows if row["id"] == name)


def open_producers(admin):
    found = admin.get("producers", topic="flights", partition=1).json["rows"]
    return [row for row in found if row["open_since"] is not None]


def test_an_open_transaction_is_shown_and_ended(broker, admin, alice):
    with opened(broker, "payments") as producer:
        row = transaction(admin, "payments")
        assert row["is_open"] and row["state"] == "Ongoing"
        assert row["partitions"] == ["flights-1"]
        (here,) = open_producers(admin)
        assert here["producer_id"] == row["producer_id"]
        refused = alice.post("transactions/end", {"id": "payments"})
        assert refused.status == 403
        assert transaction(admin, "payments")["is_open"]
        assert alice.get("transactions", fresh=1).json["rows"] == []
        assert admin.post("transactions/end", {"id": "payments"}).status == 200
        assert not transaction(admin, "payments")["is_open"]
        assert admin.post("transactions/end", {"id": "payments"}).status == 409
        with pytest.raises(MpbrokerError):
            producer.commit_transaction()
    assert open_producers(admin) == []


def test_an_abort_marker_ends_a_transaction_in_one_partition(broker, admin, alice):
    with opened(broker, "hangs"):
        (row,) = open_producers(admin)
        asked = {"topic": "flights", "partition": 1, **row}
        assert alice.post("transactions/abort", asked).status == 403
        assert open_producers(admin) == [row]
        assert admin.post("transactions/abort", asked).status == 200
        assert open_producers(admin) == []
    page = admin.get("messages", topic="flights", partition=1, count=2).json
    value, marker = page["rows"]
    assert value["transaction"] == "aborted"
    assert marker["control"] == "abort marker"


def test_log_directories_are_those_of_the_broker(broker, admin, alice):
    (row,) = admin.get("directories").json["rows"]
    assert row["path"] == str(broker.data_dir)
    assert row["error"] is None and row["partitions"] >= 2
    assert 0 < row["usable_bytes"] <= row["total_bytes"]
    assert alice.get("directories").status == 403


@pytest.mark.parametrize("path", ["transactions/end", "transactions/abort"])
def test_no_transaction_is_ended_without_the_token(admin, path):
    assert admin.post(path, {"id": "payments"}, X_CSRF_Token="").status == 403
