"""ACLs, users and quotas in the console: as the broker has them, and by its rules."""

from __future__ import annotations

import pytest

from mpbroker import AdminClient
from mpbroker.protocol.acl import AclFilter
from tests.console.serving import browser, secured
from tests.exporter.asking import wait_until

READ = {
    "principal": "User:alice",
    "type": "TOPIC",
    "name": "flights",
    "pattern": "LITERAL",
    "host": "*",
    "operation": "READ",
    "permission": "ALLOW",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("rights")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights")
        yield made


@pytest.fixture
def client(broker):
    with AdminClient(bootstrap_servers=broker.bootstrap) as made:
        yield made


@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


@pytest.fixture
def alice(broker):
    return browser(broker, "alice")


def rows(admin, path, **fields):
    return admin.get(path, fresh=1, **fields).json["rows"]


def test_an_acl_is_added_seen_in_the_matrix_and_deleted_alone(admin, alice, client):
    def sees():
        return [each["name"] for each in rows(alice, "topics")] == ["flights"]

    assert not sees()
    assert admin.post("acls/create", READ).status == 200
    assert admin.post("acls/create", READ | {"operation": "WRITE"}).status == 200
    denied = READ | {"operation": "WRITE", "permission": "DENY"}
    assert admin.post("acls/create", denied).status == 200
    wait_until(sees)
    (row,) = rows(admin, "acls", match="ALICE")
    assert row["principal"] == "User:alice" and row["name"] == "flights"
    assert row["operations"] == {"READ": ["ALLOW"], "WRITE": ["DENY", "ALLOW"]}
    assert admin.post("acls/delete", denied).status == 200
    assert admin.post("acls/delete", denied).status == 404
    (row,) = rows(admin, "acls")
    assert row["operations"] == {"READ": ["ALLOW"], "WRITE": ["ALLOW"]}
    for operation in ("READ", "WRITE"):
        assert admin.post("acls/delete", READ | {"operation": operation}).status == 200
    assert client.describe_acls(AclFilter()) == []
    wait_until(lambda: not sees())


@pytest.mark.parametrize(
    "wrong",
    [
        {"operation": "ANY"},
        {"type": "ANY"},
        {"pattern": "MATCH"},
        {"permission": "UNKNOWN"},
        {"name": ""},
        {"host": 7},
    ],
)
def test_no_filter_that_means_more_deletes_acls(admin, client, wrong):
    assert admin.post("acls/create", READ).status == 200
    assert admin.post("acls/delete", READ | wrong).status == 400
    assert len(client.describe_acls(AclFilter())) == 1
    assert admin.post("acls/delete", READ).status == 200


def test_a_user_of_scram_is_made_changed_and_removed(broker, admin):
    made = {"user": "carol", "mechanism": "SCRAM-SHA-512", "password": "first"}
    assert admin.post("users/set", made).status == 200
    assert rows(admin, "users") == [
        {"name": "carol", "mechanisms": {"SCRAM-SHA-512": 4096}}
    ]
    wait_until(lambda: browser(broker).log_in("carol", "first").status == 200)
    assert admin.post("users/set", made | {"password": "second"}).status == 200
    wait_until(lambda: browser(broker).log_in("carol", "second").status == 200)
    assert browser(broker).log_in("carol", "first").status == 403
    assert admin.post("users/set", made | {"mechanism": "PLAIN"}).status == 400
    assert admin.post("users/delete", made).status == 200
    assert rows(admin, "users") == []
    wait_until(lambda: browser(broker).log_in("carol", "second").status == 403)


def test_a_quota_is_set_seen_and_removed(admin, client):
    one = {"user": "alice", "client-id": "", "key": "producer_byte_rate"}
    assert admin.post("quotas/set", one | {"value": "2048"}).status == 200
    default = {"user": "<default>", "client-id": "app", "key": "request_percentage"}
    assert admin.post("quotas/set", default | {"value": 50}).status == 200
    assert [(each["shown"], each["quotas"]) for each in rows(admin, "quotas")] == [
        ("user <default>, client-id app", {"request_percentage": 50.0}),
        ("user alice", {"producer_byte_rate": 2048.0}),
    ]
    found = client.describe_quotas({"user": "alice"})
    assert [each.values for each in found] == [{"producer_byte_rate": 2048.0}]
    for wrong in ("much", "-1", "nan", "inf", 0):
        assert admin.post("quotas/set", one | {"value": wrong}).status == 400
    assert admin.post("quotas/set", {"key": one["key"], "value": 1}).status == 400
    for each in (one, default):
        assert admin.post("quotas/set", each | {"value": None}).status == 200
    assert rows(admin, "quotas") == []


CHANGES = {
    "acls/create": READ,
    "acls/delete": READ,
    "users/set": {"user": "eve", "mechanism": "SCRAM-SHA-256", "password": "p"},
    "users/delete": {"user": "eve", "mechanism": "SCRAM-SHA-256"},
    "quotas/set": {"user": "eve", "key": "producer_byte_rate", "value": 1},
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_user_without_the_right_changes_nothing(alice, client, path):
    refused = alice.post(path, CHANGES[path])
    assert refused.status == 403, refused.text
    assert client.describe_acls(AclFilter()) == []
    assert client.describe_quotas({}) == []


@pytest.mark.parametrize("path", ["acls", "users", "quotas"])
def test_a_user_without_the_right_sees_nothing(alice, path):
    assert alice.get(path).status == 403


@pytest.mark.parametrize("path", CHANGES)
def test_no_change_is_made_without_the_token(admin, path):
    assert admin.post(path, CHANGES[path], X_CSRF_Token="").status == 403
